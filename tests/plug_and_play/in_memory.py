"""Models with random weights and random sentences, without any file."""

from argparse import Namespace

import numpy as np
import torch
from fairseq.data import LanguagePairDataset
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_lot.pretrained.loading import Loaded, untrained

LAYERS, HEADS, LENGTHS = 2, 4, (3, 9, 5, 7, 4, 8)
# the default window is longer than these sentences, so near_far would be softmax on them
NEAR_FAR = {"near_far_window": 1, "near_far_num_features": 4}


def load(arch="lot_transformer", *, lengths=LENGTHS, source_only=False, **options):
    """A model of two layers and four heads with a few sentences; the weights of its queries and keys are doubled."""
    sizes = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_embed_dim": 16, f"{side}_ffn_embed_dim": 16, f"{side}_attention_heads": HEADS}
    if options.get("attention") == "near_far":
        options = NEAR_FAR | options
    args = Namespace(arch=arch, **(sizes | options))
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(3)
    model = untrained(args, 12, 12).eval()
    dictionary = model.encoder.dictionary
    task = TranslationTask(TranslationConfig(), dictionary, model.decoder.dictionary)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter *= 2
    random = np.random.default_rng(5)

    def sentences():
        words = [random.integers(dictionary.nspecial, len(dictionary), length - 1) for length in lengths]
        return [torch.tensor([*ids, dictionary.eos()]) for ids in words]

    source, target = sentences(), sentences()[::-1]
    targets = (None, None) if source_only else (target, list(map(len, target)))
    pairs = LanguagePairDataset(source, list(map(len, source)), dictionary, *targets, dictionary, shuffle=False)
    return Loaded(model, task, pairs, "model.pt")
