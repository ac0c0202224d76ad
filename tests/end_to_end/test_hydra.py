"""fairseq-hydra-train with our architectures."""

import pytest
import torch

from tests.end_to_end.conftest import command, generate, hypotheses, refuse


@pytest.mark.slow
def test_hydra_trains_the_attention_that_it_is_told(data, tmp_path, capsys):
    model = "{_name:lot_transformer_small,attention:lot,lot_num_pivots:5}"
    words = (
        "fairseq-hydra-train", "task=translation", f"task.data={data / 'bin'}", "task.source_lang=de",
        "task.target_lang=en", f"+model={model}", "criterion=cross_entropy", "optimizer=adam", "lr_scheduler=fixed",
        "optimization.lr=[0.001]", "optimization.max_update=2", "dataset.max_tokens=400", "dataset.num_workers=0",
        "dataset.disable_validation=true", "common.cpu=true", "common.user_dir=fairseq_lot",
        "distributed_training.distributed_world_size=1", f"checkpoint.save_dir={tmp_path}",
    )  # fmt: skip
    half = "common.bf16=true", "common.memory_efficient_bf16=true"
    assert "--memory-efficient-bf16 keeps no float32 copy" in command(*words, *half, check=False, cwd=tmp_path).stderr
    command(*words, cwd=tmp_path)
    checkpoint = tmp_path / "checkpoint_last.pt"
    weights = torch.load(checkpoint, weights_only=True)["model"]
    pivots = [weight.shape for name, weight in weights.items() if name.endswith(".mechanism.pivots")]
    assert pivots == [(4, 5, 32)] * 3
    assert len(hypotheses(generate(data / "bin", checkpoint))) == 120
    capsys.readouterr()  # hydra's notes
    refuse(capsys, "diagnose", data / "bin", "--path", checkpoint, naming=[checkpoint, "fairseq-hydra-train"])
