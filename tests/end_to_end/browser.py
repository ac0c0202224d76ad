"""Headless Chromium through its own driver, spoken to in plain WebDriver."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest


class Browser:
    """One window; scripts run in the page, errors of the page are collected."""

    def __init__(self, port, *, dark, width):
        self._root = f"http://127.0.0.1:{port}"
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1000"]
        arguments += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        self._session = f"/session/{self._ask('POST', '/session', capabilities={'alwaysMatch': options})['sessionId']}"
        # a window is at least 500 wide, what it shows need not be
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)

    def _ask(self, method, path, **body):
        request = urllib.request.Request(
            self._root + self._session + path,
            json.dumps(body).encode() if method == "POST" else None,
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, path):
        self._ask("POST", "/url", url=path.resolve().as_uri())

    def run(self, script, *args):
        return self._ask("POST", "/execute/sync", script=script, args=list(args))

    def wait(self, script):
        """Until the script returns true; the page unpacks its maps after it is loaded."""
        for _ in range(100):
            if self.run(script):
                return
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}; console: {self.messages()}")

    def devtools(self, command, **params):
        return self._ask("POST", "/goog/cdp/execute", cmd=command, params=params)

    def press(self, key):
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def messages(self):
        """What the page has put on its console so far."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", type="browser")]

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def close(self):
        self._ask("DELETE", "")


@contextlib.contextmanager
def browser(port, *, dark=False, width=1200):
    """A window of a browser of its own; the test is skipped where none is installed."""
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
                break
            time.sleep(0.1)
        window = Browser(port, dark=dark, width=width)
        yield window
        window.close()
    finally:
        process.terminate()
        process.wait()
