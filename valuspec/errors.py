"""All errors this project raises on purpose.

ValuSpecError
├── InvalidTreeError      a draft tree breaks a structural rule
│   └── CorruptTreeError  a stored blob is damaged, foreign or of another version
├── ThresholdError        a threshold set is refused (reason in the message)
├── ModelError            a target model cannot be loaded or is not supported
├── RankLostError         a rank of a target split over several is lost; the target is of no use
└── RequestError          a request asks for something that cannot be served

Messages say what was found, the limit, and the remedy.
"""


class ValuSpecError(Exception):
    """Base class."""


class InvalidTreeError(ValuSpecError, ValueError):
    """A draft tree breaks a structural rule."""


class CorruptTreeError(InvalidTreeError):
    """A stored draft tree cannot be trusted: damaged, foreign or of another version."""


class ThresholdError(ValuSpecError, ValueError):
    """A threshold set is refused; the message gives the reason."""


class ModelError(ValuSpecError):
    """A target model cannot be loaded or is not supported."""


class RankLostError(ValuSpecError):
    """A rank of a target split over several is dead, hung or out of step.

    The target cannot compute anything again; whoever hosts it starts another.
    """


class RequestError(ValuSpecError, ValueError):
    """A request cannot be served as asked.

    `param` names the offending request parameter, `code` is the OpenAI error code if one fits.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
