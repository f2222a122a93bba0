# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # はじめに：このノートブック集の読み方
#
# 『基盤モデルのための強化学習』の 2.3.5.2 節と 4.4.2〜5.3.4 節を、手を動かしながら読むためのノートブック集です。節ごとに 1 冊あり、どれも同じ作りで、同じ道具を使います。
# この 1 冊では、その道具を一つずつ触ります。読む順番、主張の読み方、全部を数え上げられる世界、小さな言語モデル、そして記号の一覧です。
# 準備のしかたは [README](../README.md) に、実行時間の実測値は [RUNTIMES.md](../RUNTIMES.md) にあります。

# %%
from companion.notebook import check, claim, setup

setup()

# %% [markdown]
# ## 読む順番
#
# 本書の順に読むのが素直ですが、1 冊ずつ読めるようにも書いてあります。先に読んでおくと楽なものを、右の列に書きました。
#
# | 節 | 分かること | 先に読むとよい節 |
# |---|---|---|
# | [2.3.5.2](2.3.5.2-ppo-clip.ipynb) 方策勾配からクリッピングまで | 方策勾配、ベースライン、GAE、重要度比、クリッピング | – |
# | [4.4.2](4.4.2-reward-model.ipynb) 報酬モデル | 比較から報酬を学ぶ。何が分かり、何が分からないか | – |
# | [4.4.3](4.4.3-ppo-rlhf.ipynb) PPO による RLHF | 報酬モデルと KL で方策を動かす。 $\pi^*$、報酬のハッキング | 2.3.5.2、4.4.2 |
# | [4.5.1](4.5.1-dpo.ipynb) DPO | 強化学習なしで $\pi^*$ を目指す | 4.4.2 |
# | [4.5.4.2](4.5.4.2-ipo.ipynb) IPO | 迷いのない選好で、DPO がどこまでも進むのを止める | 4.5.1 |
# | [4.5.4.3](4.5.4.3-kto.ipynb) KTO | 対のない「良い」「悪い」から学ぶ | 4.5.1 |
# | [5.3.1](5.3.1-grpo.ipynb) GRPO | グループの中で比べる。KL の項の行き先 | 2.3.5.2 |
# | [5.3.2](5.3.2-dr-grpo.ipynb) Dr. GRPO | GRPO の勾配の偏りと、その直し方 | 5.3.1 |
# | [5.3.3](5.3.3-dapo.ipynb) DAPO | トークンの平均、上側の幅、動的サンプリング、長さの罰 | 5.3.1 |
# | [5.3.4](5.3.4-gspo.ipynb) GSPO | 回答に一つの重要度比。4 つの手法の比較 | 5.3.1 |
#
# 急ぐ人は、選好から学ぶ方法なら 4.5.1 節、検証できる報酬から学ぶ方法なら 5.3.1 節から始めてください。

# %% [markdown]
# ## 1 冊の作り
#
# どのノートブックも、次の順に並んでいます。
#
# 1. **記号** 本書の記号と、コードの変数と、TRL での名前の対応
# 2. **導出** 式が出てくるまでの一歩一歩。小さな世界で両辺を計算し、等しいことを確かめます
# 3. **実装** 損失を、式のとおりの NumPy と、PyTorch で
# 4. **TRL との照合** TRL のトレーナーそのものと、値と勾配を比べます。式と TRL の違いも、数で示します
# 5. **学習** 小さな言語モデルを TRL で学習させます
# 6. **実験** その手法でいちばん大事な現象を、小さく再現します
# 7. **演習** 言葉の演習と、自動採点できる演習ノートブック
#
# 式の番号は、本書のサポートページが数式や量と結び付けているものだけを書いています。

# %% [markdown]
# ## 主張の読み方
#
# 本文の主張は、そのすぐ下のセルで確かめます。 `claim` は等式で、左辺と右辺を別々の道筋で計算し、差が許容差（断りがなければ 1e-10）以下であることを確かめます。 `check` は不等式や傾向です。

# %%
n = 100
claim("1 + 2 + … + n = n(n + 1)/2", sum(range(1, n + 1)), n * (n + 1) / 2)
harmonic = sum(1 / k for k in range(1, 10_001))
check("1 + 1/2 + 1/3 + … は、10,000 項を足しても 10 に届かない",
      harmonic < 10, f"{harmonic:.3f}")

# %% [markdown]
# 成り立たない主張は、そこでエラーになって、ノートブックが止まります。だから、✓ の付いた主張は、お手元でも確かめ直されたものです。わざと間違えてみましょう。

# %%
try:
    claim("1 + 2 + … + n = n²", sum(range(1, n + 1)), n**2)
except AssertionError as error:
    print("止まりました:", error)

# %% [markdown]
# 乱数を使う主張（学習の結果など）は、種を固定してあります。同じマシンでは同じ値になりますが、マシンや torch の版が違うと、小数の最後の桁や、学習の途中の値は変わります。本文の数は、それでも言えることだけを言うようにしてあります。

# %% [markdown]
# ## 全部を数え上げられる世界
#
# 導出を確かめる舞台です。文字が 2 つ、回答が 2 トークンまでの世界を作ってみましょう。回答は、終わりの記号 EOS（ `$` ）で終わるか、長さの上限で打ち切られます。

# %%
from companion.exact import World

world = World(prompts=1, letters=2, max_length=2)
print(world.responses)

# %% [markdown]
# 方策は、接頭辞ごとに次のトークンのロジットを並べた表です。回答の確率は、トークンの確率の積で、全部の和は 1 です。

# %%
import torch

logits = world.random_logits(torch.Generator().manual_seed(0))
logps = world.log_probs(logits)  # log π(y|x)、形状は (プロンプト, 回答)
for y, p in zip(world.responses, logps.exp()[0].tolist(), strict=True):
    print(f"π({y}) = {p:.3f}")

# %%
first, second = logits[0].softmax(-1)[[0, 1]]  # 接頭辞「」と「a」の行
claim("π(ab) = π(a) π(b|a)",
      logps.exp()[0, world.responses.index("ab")], first[0] * second[1])
claim("Σ_y π(y) = 1", logps.exp().sum(-1), 1)

# %% [markdown]
# 回答を全部並べられるので、期待値は有限の和です。サンプリングの誤差なしに、等式の両辺を計算できます。たとえば回答の長さの期待値は、こうなります。

# %%
from companion.exact import expect

lengths = world.mask.sum(-1).double()
exact_length = expect(logps.exp(), lengths)
claim("E[|y|] = 1 + P(1 文字目が EOS でない)",
      exact_length, 1 + (1 - first[2]))

# %% [markdown]
# 本物の言語モデルでは、数え上げる代わりにサンプリングします。 $n$ 個の平均の誤差は $1/\sqrt n$ で小さくなります。

# %%
from companion.exact import sample

for n in (100, 10_000):
    y = sample(logps.exp(), n, torch.Generator().manual_seed(0))
    print(f"n = {n:6,}: 平均の長さ {lengths[y].mean():.4f}"
          f"（正確な値 {exact_length.item():.4f}）")

# %% [markdown]
# ## 小さな言語モデル
#
# 学習の章で使うのは、1 文字を 1 トークンとする、とても小さな言語モデル（Qwen2 と同じ構造、2 層、幅 64）です。課題は 2 つです。
#
# - **素数の和** 「20未満の素数の合計は？」→「77」。サポートページの例です。問題は 100 通りで、モデルは答えを丸暗記します
# - **並べ替え** 「780667>」→「066778」。学習に使わない問題で測れます

# %%
from companion.lm import build_tokenizer, new_model

tokenizer, model = build_tokenizer(), new_model("tiny", seed=0)
print(f"パラメータ {model.num_parameters():,} 個、"
      f"語彙 {len(tokenizer)} 文字")
print(tokenizer.tokenize("20未満の素数の合計は？"))

# %% [markdown]
# 出発点のモデルは、4 割が正解、残りがもっともらしい間違い、という手本で学ばせます（SFT にあたります）。手本を見てみましょう。

# %%
from companion.tasks import PRIME_SUMS, demonstrations

examples = demonstrations(PRIME_SUMS, 250 * 64, right=0.4, seed=0)
table = examples.select(range(6)).to_pandas()
table["正解"] = [PRIME_SUMS.answer(x) for x in table["prompt"]]
table

# %% [markdown]
# 実際に学ばせます。250 回の更新です。

# %%
from companion.lm import measure
from companion.lm.warmup import warm_up

prompts = PRIME_SUMS.test_prompts
before = measure(model, tokenizer, PRIME_SUMS, prompts)
losses = warm_up(model, tokenizer, examples)
after = measure(model, tokenizer, PRIME_SUMS, prompts)

# %%
from companion.plots import curves

curves({"loss": losses}, {"トークンの平均の損失（nat）": "loss"})

# %%
import pandas as pd

rates = pd.DataFrame({"学習前": before, "学習後": after})
rates.rename({"greedy": "貪欲法の正解率", "sampled": "サンプリングの正解率"})

# %%
check("貪欲法では、ほとんど正解", after["greedy"] > 0.9,
      f"{after['greedy']:.2f}")
check("サンプリングでは、手本と同じくらいしか正解しない",
      0.3 < after["sampled"] < 0.5, f"{after['sampled']:.2f}")

# %% [markdown]
# モデルは答えを「知って」います（いちばん確率の高い回答は正解です）が、サンプリングすると、手本と同じ割合で間違えます。だから、どの手法にも、最初の一歩から学ぶことがあります。このノートブック集の「学習」は、知っている答えの確率を上げる（鋭くする）学習で、新しい知識を得る学習ではありません。
#
# このモデルは、 `companion.lm.load("prime-sums")` で読めるように、パッケージに入れてあります。

# %% [markdown]
# ## プリセット
#
# バッチの大きさや更新の回数は、手法ごとに 2 通りの組（プリセット）にしてあります。 `cpu` は、ノート PC で 1 冊 1 分くらいで終わる大きさで、保存してある出力もこれで作りました。 `gpu` は、CUDA があるときに選ばれる、大きめの設定です（まだ GPU では試していません）。環境変数 `COMPANION_PRESET` で選ぶこともできます。

# %%
from dataclasses import asdict

from companion.training import PRESETS

shown = ["method", "size", "examples", "batch_size", "steps",
         "learning_rate", "beta"]
cpu_rows = [row for (_, name), row in PRESETS.items() if name == "cpu"]
pd.DataFrame([asdict(row) for row in cpu_rows])[shown]

# %% [markdown]
# ## 記号の一覧
#
# どのノートブックでも同じ意味で使う記号です。その節だけの記号は、各ノートブックの「記号」にあります。単位は、対数確率も KL も nat です。
#
# | 記号 | 変数 | 節 |
# |---|---|---|
# | $x$ ：プロンプト | `prompt` | すべて |
# | $y$ ：回答 | `completion` | すべて |
# | $\lvert y\rvert$ ：回答の長さ（EOS を数えます） | `lengths` (B,) | すべて |
# | $y_w$ ：好まれた回答 | `chosen` | 4.4.2、4.5.1、4.5.4.2 |
# | $y_\ell$ ：好まれなかった回答 | `rejected` | 4.4.2、4.5.1、4.5.4.2 |
# | $y_i$ ：グループの $i$ 番目の回答 | `completions` | 5.3.1〜5.3.4 |
# | $G$ ：グループの大きさ | `group_size` | 5.3.1〜5.3.4 |
# | $\pi_\theta$ ：方策（いま学習しているモデル） | `logps` (B,) または (B, T) | すべて |
# | $\pi_{\mathrm{ref}}$ ：参照方策（離れすぎないための基準） | `ref_logps` 同じ | 4.4.2〜5.3.1 |
# | $\pi_{\theta_{\mathrm{old}}}$ ：回答を生成したときの方策 | `old_logps` (B, T) | 2.3.5.2、4.4.3、5.3.1〜5.3.4 |
# | $\pi^*$ ：式 (4.9) を最大にする方策 | `star_logps` (X, Y) | 4.4.3〜5.3.1 |
# | $r$ ：真の報酬 | `rewards` (B,)、世界では (X, Y) | すべて |
# | $r_\phi$ ：報酬モデルの点数 | `scores` (B,) | 4.4.2、4.4.3 |
# | $\beta$ ：KL 正則化の係数 | `beta` | 4.4.3〜5.3.1 |
# | $h_\theta$ ：対数確率比（方策と参照方策の対数確率の差） | `log_ratios`, `h` | 4.5.4.2、4.5.4.3 |
# | $\widehat A$ ：アドバンテージの推定 | `advantages` (B,) または (B, T) | 2.3.5.2、4.4.3、5.3.1〜5.3.4 |
# | $w$ ：トークンの重要度比 | `ratio` (B, T) | 2.3.5.2、4.4.3、5.3.1〜5.3.4 |
# | $\xi$ ：系列の重要度比 | `xi` (B,) | 5.3.4 |
# | $\epsilon$ ：クリッピングの幅 | `epsilon` | 2.3.5.2、4.4.3、5.3.1〜5.3.4 |
# | $V$ ：価値 | `values` (B, T) | 2.3.5.2、4.4.3 |
# | $\gamma$ ：割引率 | `gamma` | 2.3.5.2、4.4.3 |
# | $\lambda$ ：GAE の係数 | `lam` | 2.3.5.2、4.4.3 |
#
# `logps` の類は対数確率です。
# 形状の文字は、B が回答の数（バッチ）、T がトークンの数、X が世界のプロンプトの数、Y が世界の回答の数です。

# %% [markdown]
# ## 困ったとき
#
# - **動かない** [README](../README.md) の「はじめる」の手順を、新しい仮想環境でやり直してみてください。 `python -m companion info` の出力が、版とデバイスを教えてくれます。
# - **`bf16` のエラー** サポートページのコードをそのまま CPU で動かすと出ます。各ノートブックの「サポートページのコードを CPU で動かす」に、直し方があります。
# - **時間がかかる** 実測値は [RUNTIMES.md](../RUNTIMES.md) にあります。ほかのプログラムが動いていると、数倍になることがあります。
# - **数が少し違う** 主張の ✓ が付いていれば問題ありません。✓ の代わりにエラーが出たら、環境の版を、上の最初のセルの出力と比べてください。
# - **本文や主張の誤りを見つけた** このリポジトリの Issue でお知らせください。本書の内容については、本書のサポートページをご覧ください。TRL そのものの使い方や不具合は、 [TRL のリポジトリ](https://github.com/huggingface/trl) が窓口です。
