"""torch.export of whole models; torch.jit.trace is refused, as it would fix choices that depend on data."""

import pytest
import torch
from torch import nn

from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError
from tests.conftest import close, softmax_in_its_own_dtype
from tests.plug_and_play import in_memory

EVERYWHERE = {"attention_sites": "encoder,cross,decoder"}
SYSTEMS = [
    *({"attention": name} for name in MECHANISMS),
    *({"attention": name, **EVERYWHERE} for name in ("lot", "near_far", "softmax")),
    {"attention": "near_far", "near_far_exact_up_to": 6, **EVERYWHERE},
    {"attention": "near_far", "near_far_exact_up_to": 6, "near_far_num_updates": 3},
    {"attention": "near_far", "near_far_prior": "alibi", "attention_sites": "encoder,decoder"},
    {"attention": "esp", "esp_hard": True},
    {"attention": "softmax", "differential": True},
]


class Scores(nn.Module):
    """Makes a model return one tensor: the scores of the next pieces, with teacher forcing."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return self.model(*inputs)[0]


def inputs(loaded, sentences):
    sample = loaded.batch(sentences)["net_input"]
    return sample["src_tokens"], sample["src_lengths"], sample["prev_output_tokens"]


@pytest.mark.fast_if(lambda system: system.get("attention") == "near_far" and "near_far_prior" not in system)
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: "-".join(map(str, system.values())))
def test_an_exported_model_computes_the_same_for_other_sentences(system, tmp_path):
    """It is recorded without pads, at moderate scores, on one side of ``exact_up_to``; it is run on other inputs."""
    loaded = in_memory.load(**system, lengths=(9, 9, 9, 3, 9, 7, 9, 5, 4, 9))
    model = Scores(loaded.model).double()
    with torch.no_grad(), softmax_in_its_own_dtype():
        torch.export.save(torch.export.export(model, inputs(loaded, [0, 2])), tmp_path / "model.pt2")
        exported = torch.export.load(tmp_path / "model.pt2").module()
        for _ in range(2):
            for pair in ([0, 2], [1, 3], [4, 5], [6, 8]):
                given = inputs(loaded, pair)
                assert all(x.shape[1] == 9 for x in given[::2])
                close(exported(*given), model(*given), 1e-10)
            for parameter in (*model.named_parameters(), *exported.named_parameters()):
                if parameter[0].endswith(("q_proj.weight", "k_proj.weight")):
                    parameter[1].mul_(8)  # then scores are too large for the paths of moderate ones
        with pytest.raises(AssertionError, match="Guard failed"):
            exported(*inputs(loaded, [3, 7]))


def test_an_export_leaves_no_tensor_in_a_cache():
    """After an export the model computes with its own tensors, not with recorded ones."""
    loaded = in_memory.load(attention="near_far", **EVERYWHERE)
    given = inputs(loaded, [1, 2])
    with torch.no_grad():
        torch.export.export(Scores(loaded.model), given)
        after = loaded.model(*given)[0]
        close(after, in_memory.load(attention="near_far", **EVERYWHERE).model(*given)[0], 0.0)


@pytest.mark.parametrize("attention", MECHANISMS)
def test_a_trace_is_refused_in_one_line(attention):
    loaded = in_memory.load(attention=attention)
    with pytest.raises(InputError, match="^torch.jit.trace would record .*; use torch.export.export$"):
        torch.jit.trace(Scores(loaded.model), inputs(loaded, [1, 2]))
