"""What several tests do with models: make them, take gradients, compare."""

import copy

import torch

from examples.nanogpt.engine import first_seeds
from examples.nanogpt.twin import Twin


def make(kind, config, corpus, tier="fp32", seed=0, trained=False):
    """A model on the corpus's device. `trained`: weights of a size that training leads to; at
    first they are so small that GELU is nearly linear and softmax nearly flat."""
    torch.manual_seed(seed)
    model = kind(config, corpus.tokeniser.tokens, tier)
    model.seeds.copy_(first_seeds(config, seed))
    if kind is Twin:
        model.same_masks = True
    if trained:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if bool((p == p.flatten()[0]).all()):  # norms, biases, queries of AttnRes
                    p.add_(0.2 * torch.randn(p.shape))
                elif not name.endswith("dt_bias"):
                    p.mul_(5)
    return model.to(corpus.train.device)


def batch_of(corpus, config):
    n = config.batch * config.context
    ids = corpus.train[:n].view(config.batch, -1)
    return ids, corpus.train[1 : n + 1].view(config.batch, -1)


def gradients(model, ids, targets):
    """The loss, and the gradient of every parameter by name."""
    model.zero_grad(set_to_none=True)
    loss = model(ids, targets)
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}


def errors(found, exact):
    """Relative L2 error of every gradient."""
    return {name: ((found[name] - g).norm() / g.norm()).item() for name, g in exact.items()}


def in_fp64(model):
    return copy.deepcopy(model).double()
