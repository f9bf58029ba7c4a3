"""EAGLE-3 draft heads: the model, published checkpoints, dynamic trees, training.

A head predicts what the target will say from hidden states the target has computed anyway
(arXiv 2503.01840). It proposes; the target verifies as always.
"""
