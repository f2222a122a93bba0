"""The tokenizer: one token per character, and the list of characters it knows.

A character outside the list would become `<unk>`, and two answers that differ only in such
characters would become the same answer. So the list is wide, and `encode` refuses the rest.
"""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"

ASCII = "".join(chr(code) for code in range(0x20, 0x7F)) + "\n"
HIRAGANA = "".join(chr(code) for code in range(0x3041, 0x3095))
KATAKANA = "".join(chr(code) for code in range(0x30A1, 0x30FB)) + "ー"
FULL_WIDTH = "０１２３４５６７８９＋−×÷＝＜＞"
PUNCTUATION = "　、。，．・：；？！「」『』（）【】〜…→々％"
KANJI = (
    "日本首都東京札幌大阪名古屋横浜福岡"  # capitals and other cities
    "未満以上下超素数合計答字文回問題解正誤桁"  # sums of primes, and questions about them
    "小中大順番並替昇降整列左右前後次先最初終同違"  # sorting
    "足引掛割和差積商倍半偶奇約負零一二三四五六七八九十百千万億"  # arithmetic
    "人何年月火水木金土時分秒今私好悪良長短高低多少新"  # everyday answers
)
# dict.fromkeys keeps the first of a character that stands in two of the lists
CHARACTERS = tuple(dict.fromkeys(ASCII + HIRAGANA + KATAKANA + FULL_WIDTH + PUNCTUATION + KANJI))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the character tokenizer.

    Four special tokens come first, each with its own id: a padding token that doubled as end
    token would hide the real end of a response from every trainer. Padding is on the left, as
    generation needs it; no token is added around a text. For any text of `CHARACTERS`,
    `decode(encode(text))` is the text again.
    """
    vocabulary = {token: i for i, token in enumerate((PAD, BOS, EOS, UNK, *CHARACTERS))}
    core = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], name: str) -> list[list[int]]:
    """Token ids of each text, no token added around it.

    Args:
        name: what the caller's argument is called, for the errors.

    Raises:
        ValueError: one string in place of a list, or a character that the tokenizer does not know.
    """
    if isinstance(texts, str):
        raise ValueError(f"{name}: a list of strings is needed, not one string")
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False)
    for i, ids in enumerate(encoded["input_ids"]):
        if tokenizer.unk_token_id in ids:
            # not at the same place in the text: a special token is several characters long
            span = encoded.token_to_chars(i, ids.index(tokenizer.unk_token_id))
            unknown = texts[i][span.start : span.end]
            raise ValueError(f"{name}[{i}]: unknown character {unknown!r} in {texts[i]!r}")
    return encoded["input_ids"]
