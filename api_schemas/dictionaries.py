"""The schemas of stored dictionaries: sparse autoencoders and transcoders, their features and labels.

The numbers of a version are immutable; only the labels of its features can be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, Discriminator, Field, PrivateAttr, Tag

from api_schemas.fields import (
    Integer,
    Listed,
    NameOrText,
    Page,
    PointText,
    StoredName,
    Strict,
    text_or_number,
)

MAX_LABEL_CHARACTERS = 500
"""The longest label of a feature."""


class DictionaryName(NameOrText):
    """A dictionary on the server: the newest version of a name, ``gemma``, or a specific one, ``gemma@2``.

    Also written as a plain string. With ``id`` it is the dictionary with this id, whichever tenant's
    dictionary has the name for the caller.
    """


class DictionaryUsed(BaseModel):
    """The dictionary that a name resolved to."""

    name: str
    version: int
    id: str


class LabelReader(Protocol):
    async def of(self, ids: Sequence[int]) -> dict[int, str]:
        """Return the labels of those features that have one."""
        ...

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return the bytes of the labels of some features, as far as they have been read."""
        ...


class NamedDictionary(DictionaryName):
    """A stored dictionary that a name resolved to; made by the server only."""

    _used: DictionaryUsed | None = PrivateAttr(default=None)
    _content: Any = PrivateAttr(default=None)
    _labels: LabelReader | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, used: DictionaryUsed, content: object, labels: LabelReader | None = None) -> NamedDictionary:
        """Wrap a ``features.config.StoredDictionary``, without checks."""
        dictionary = cls.model_construct(name=used.name, id=used.id)
        dictionary._used, dictionary._content, dictionary._labels = used, content, labels  # noqa: SLF001 - our own
        return dictionary

    @property
    def used(self) -> DictionaryUsed | None:
        return self._used

    @property
    def content(self) -> Any:
        """The ``features.config.StoredDictionary``."""
        return self._content

    @property
    def labels(self) -> LabelReader | None:
        return self._labels


class DictionaryUpload(BaseModel):
    """A dictionary in SAELens' layout, in the fields of a form: for documentation.

    Attributes:
        name: Its name in operations; an existing name gets a new version.
        weights: The file of its tensors, ``sae_weights.safetensors``.
        cfg: Its ``cfg.json``, as a file or as text.
        labels: Labels of features, as JSON or CSV, as a file or as text.
        at: The point that it reads; by default that of the cfg's ``hook_name``.
        output_at: The point whose value a transcoder reconstructs; by default that of ``hook_name_out``.
        shared: Whether every tenant may use it; for keys with the scope ``admin``.
    """

    name: StoredName
    weights: str = Field(json_schema_extra={"format": "binary"})
    cfg: str
    labels: str | None = None
    at: str | None = None
    output_at: str | None = None
    shared: Literal["true", "false"] = "false"


class DictionaryFromHub(Strict):
    """A dictionary that the server downloads from the Hugging Face Hub, in SAELens' layout.

    Attributes:
        name: Its name in operations; an existing name gets a new version.
        source: ``hf://OWNER/NAME/FOLDER``, ``hf://OWNER/NAME@REVISION/FOLDER``, ``saelens://RELEASE/ID`` or
            ``neuronpedia://MODEL/SOURCE``.
        at: The point that it reads; by default that of the cfg's ``hook_name``.
        output_at: The point whose value a transcoder reconstructs; by default that of ``hook_name_out``.
        shared: Whether every tenant may use it; for keys with the scope ``admin``.
    """

    name: StoredName
    source: str = Field(strict=True, min_length=1, max_length=512)
    at: PointText | None = None
    output_at: PointText | None = None
    shared: bool = Field(default=False, strict=True)


class Dictionary(Listed):
    """A stored dictionary.

    Attributes:
        id: Its id.
        object: Always ``dictionary``.
        name: Its name in operations.
        version: Its version; ``name@version`` always refers to this dictionary.
        model: The server's name of its model.
        trained_on: The model that its cfg names; null if it names none.
        warnings: That its cfg names another model than the one that the server has.
        architecture: Its architecture, by SAELens' name.
        at: The point that it reads.
        output_at: The point whose value it reconstructs; null if it is ``at``.
        input_width: The width of the values at ``at``.
        output_width: The width of the values that it reconstructs.
        num_features: The number of its features.
        num_labels: The number of features with a label.
        dtype: The dtype of its weights.
        shared: Whether every tenant may use it.
        own: Whether it belongs to the caller's tenant.
        sha256: SHA-256 of the file of its weights, hexadecimal.
        weights_bytes: The size of this file in bytes.
        bytes: The bytes that it is counted with: weights, cfg and labels.
        created_at: The time of its creation, in seconds since 1970.
    """

    object: Literal["dictionary"] = "dictionary"
    name: str
    version: int
    model: str
    trained_on: str | None
    warnings: list[str] = Field(default_factory=list)
    architecture: str
    at: str
    output_at: str | None
    input_width: int
    output_width: int
    num_features: int
    num_labels: int
    dtype: Literal["float32", "float16", "bfloat16"]
    shared: bool
    own: bool
    sha256: str
    weights_bytes: int
    bytes: int
    created_at: float


class DictionaryList(Page[Dictionary]):
    """A page of dictionaries, the newest first, in the format of OpenAI's lists."""


FeatureId = Annotated[int, Field(ge=0)]

FeatureName = Annotated[
    Annotated[str, Field(strict=True, min_length=1, max_length=MAX_LABEL_CHARACTERS), Tag("text")]
    | Annotated[Integer, Field(ge=0), Tag("number")],
    Discriminator(text_or_number),
]
"""A feature: its id, or its exact label."""


class DictionaryFeature(BaseModel):
    """A feature of a dictionary.

    Attributes:
        id: Its number, counted from 0: its column of ``W_enc`` and its row of ``W_dec``.
        label: Its label; null if it has none.
    """

    id: FeatureId
    label: str | None = None


class FeatureList(BaseModel):
    """A page of features, by id.

    Attributes:
        object: Always ``list``.
        data: The features.
        last_id: The id of the last one; pass it as ``after`` for the next page.
        has_more: Whether there is a next page.
    """

    object: Literal["list"] = "list"
    data: list[DictionaryFeature]
    last_id: int | None = Field(default=None, description="Pass it as `after` for the next page.")
    has_more: bool
