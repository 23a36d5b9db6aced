# The public names of `fedjaxsim.audit`, for type checkers and `lazy_loader`.
from .attacks import Attack as Attack
from .attacks import Evidence as Evidence
from .attacks import likelihood_ratio as likelihood_ratio
from .canaries import AuditResult as AuditResult
from .canaries import Bound as Bound
from .canaries import audit as audit
from .one_run import OneRunResult as OneRunResult
from .one_run import result as result
from .one_run import with_canaries as with_canaries

__all__: list[str]
