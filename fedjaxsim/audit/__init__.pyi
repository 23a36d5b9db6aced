# The public names of `fedjaxsim.audit`, for type checkers and `lazy_loader`.
from .attacks import Attack as Attack
from .attacks import Evidence as Evidence
from .attacks import likelihood_ratio as likelihood_ratio
from .canaries import AuditResult as AuditResult
from .canaries import Bound as Bound
from .canaries import audit as audit

__all__: list[str]
