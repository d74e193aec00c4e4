"""The one exception tree of the services. `shared.server` maps it to gRPC status codes in one table.

    HeadraceError
    ├── InvalidRequestError       the request can never be served as it is
    ├── ModelMismatchError        caller and replica disagree about model, dtype or layout
    ├── CapacityError             no room now: queue, KV pool, spool
    ├── DeadlineError             the caller's time is over
    ├── UnavailableError          draining, a peer is down, a layer cannot be read right now
    ├── DataLossError             stored weights are damaged
    └── ConfigurationError        the operator's settings cannot work
        ├── BudgetError           the memory budget is too small
        └── UnsupportedModelError a checkpoint that this version does not load

A message says what was wrong, what was found, and what to do.
"""


class HeadraceError(Exception):
    """Base of everything this project raises on purpose."""


class InvalidRequestError(HeadraceError):
    """The request can never be served as it is."""


class ModelMismatchError(HeadraceError):
    """Caller and replica disagree about the model, the KV dtype or the KV layout."""


class CapacityError(HeadraceError):
    """There is no room now; the same request may succeed later or with a larger budget."""


class DeadlineError(HeadraceError):
    """The caller's time was over before there was an answer."""


class UnavailableError(HeadraceError):
    """The service cannot answer right now; another replica may."""


class DataLossError(HeadraceError):
    """Stored weights are damaged: truncated, changed, or not what their digest says."""


class ConfigurationError(HeadraceError):
    """The operator's settings cannot work."""


class BudgetError(ConfigurationError):
    """The memory budget is too small for what was asked."""


class UnsupportedModelError(ConfigurationError):
    """A checkpoint that this version does not load."""
