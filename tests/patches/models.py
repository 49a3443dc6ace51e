"""A model file in the shape of SGLang's deepseek_v2.py, as small as the edits allow."""

from __future__ import annotations

STOCK = '''\
"""Inference-only DeepseekV2 model."""

import torch
from torch import nn
from sglang.srt.utils import make_layers


class DeepseekV2Model(nn.Module):
    def __init__(self, config, prefix=""):
        super().__init__()
        self.layers, self.start_layer, self.end_layer = make_layers(config)
        self.layers_to_capture = []

    def forward(self, input_ids, positions, forward_batch, pp_proxy_tensors=None):
        aux_hidden_states = []
        for i in range(self.start_layer, self.end_layer):
            with nullcontext():
                if i in self.layers_to_capture:
                    aux_hidden_states.append(hidden_states + residual)
                layer = self.layers[i]
                hidden_states, residual = layer(positions, hidden_states, residual)

        if not self.pp_group.is_last_rank:
            return PPProxyTensors({"hidden_states": hidden_states})
        else:
            hidden_states, _ = self.norm(hidden_states, residual)
        if len(aux_hidden_states) == 0:
            return hidden_states
        return hidden_states, aux_hidden_states


class DeepseekV2ForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = DeepseekV2Model(config)
        self.capture_aux_hidden_states = False

    def forward(self, input_ids, positions, forward_batch):
        hidden_states = self.model(input_ids, positions, forward_batch)
        aux_hidden_states = None
        if self.capture_aux_hidden_states:
            hidden_states, aux_hidden_states = hidden_states
        return self.logits_processor(hidden_states, aux_hidden_states)

    def set_eagle3_layers_to_capture(self, layer_ids):
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [val + 1 for val in layer_ids]


EntryClass = [DeepseekV2ForCausalLM]
'''
