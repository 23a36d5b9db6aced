# The public names of `fedjaxsim.models`, for type checkers and `lazy_loader`.
from .model import Model as Model
from .model import in_bfloat16 as in_bfloat16
from .model import linear as linear
from .modules import from_equinox as from_equinox
from .modules import from_flax as from_flax
from .modules import from_nnx as from_nnx
from .modules import trainable as trainable
from .network import cnn as cnn
from .network import conv2d as conv2d
from .network import max_pool2d as max_pool2d
from .network import mlp as mlp
from .sequences import gru as gru
from .sequences import transformer as transformer

__all__: list[str]
