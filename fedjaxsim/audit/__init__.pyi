# The public names of `fedjaxsim.audit`, for type checkers and `lazy_loader`.
from .bounds import AuditResult as AuditResult
from .bounds import audit as audit
from .bounds import result as result
from .canaries import with_canaries as with_canaries

__all__: list[str]
