"""Read a drafter in the speculators layout with the speculators library: run by serve.py in the server's environment.

    python read_speculators.py FOLDER

Prints one JSON object: how many weights there are, which of them differ from the file, and what its config says.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel

folder = sys.argv[1]
model: Any = SpeculatorModel.from_pretrained(folder, dtype=torch.float32)
written = load_file(f"{folder}/model.safetensors")
read = model.state_dict()
differing = [
    name
    for name, weight in written.items()
    if name not in read or not torch.equal(read[name], weight.to(torch.float32))
]
config = model.config
said = {
    "weights": len(written),
    "differing": differing,
    "layers": list(config.aux_hidden_state_layer_ids),
    "block_size": config.block_size,
    "mask_token_id": config.mask_token_id,
    "sample_from_anchor": config.sample_from_anchor,
    "rope_theta": config.transformer_layer_config.rope_parameters["rope_theta"],
}
print(json.dumps(said))
