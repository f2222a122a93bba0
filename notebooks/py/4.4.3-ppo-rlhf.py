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
# # 4.4.3 RLHF と PPO：参照方策から離れすぎずに、点数を上げる
#
# 本書 4.4.3 節の式 (4.9) と (4.10) を扱います。
#
# 4.4.2 節では、人の選好から報酬モデルを学習しました。RLHF の 2 段目では、その点数が高い回答を書くように、方策を PPO で学習します。ただし、点数だけを追うと報酬モデルの穴を突くので、参照方策からの KL ダイバージェンスにペナルティ（罰）を付けます。
# このノートブックでは、罰を付けた目的関数 (4.9) が何を最大にし、それがなぜトークンごとの報酬 (4.10) に分けられるのかを、小さな世界で一つずつ計算します。続いて、TRL の `PPOTrainer` と値・勾配を照合し、式と違うところを数で確かめます。
# 最後に、4 つのモデルを使って小さな言語モデルを学習させ、 $\beta$ を小さくすると何が起こるかを見ます。
#
# PPO のクリッピング (2.29) と GAE は、2.3.5.2 節のノートブックで導きました。ここでは、それを使います。
# 準備のしかたは [README](../README.md) に、実行時間の実測値は [RUNTIMES.md](../RUNTIMES.md) にあります。 `companion` は、このノートブックのための小さなパッケージです。
# `claim` は等式の両辺を計算して比べ（許容差は、断りがなければ 1e-10）、 `check` は条件を確かめます。成り立たなければ、そこでエラーになって止まります。

# %%
import torch

from companion.notebook import check, claim, setup

setup()

# %% [markdown]
# **TRL の版について** `PPOTrainer` は、TRL の 1.13.0 でなくなりました。上の行に出ている TRL が 1.12.0 以前なら、このノートブックは全部動きます。それより新しい版では、TRL との照合と言語モデルの学習を飛ばし、飛ばしたところに `SKIPPED` と理由を表示します。導出、NumPy と PyTorch の照合、数え上げる世界での実験は、どの版でも動きます。

# %%
from companion.oracle import HAS_PPO


def with_trl(what):
    """TRL に PPOTrainer があるか。なければ、何を飛ばすかを表示する。"""
    if not HAS_PPO:
        print(f"SKIPPED: {what}（この TRL には PPOTrainer がありません）")
    return HAS_PPO

# %%
if with_trl("TRL との照合と、言語モデルの学習"):
    print("PPOTrainer があります。全部のセルを実行します")

# %% [markdown]
# ## 記号
#
# | 記号 | 変数 | 形状 | TRL での名前 |
# |---|---|---|---|
# | $x,\ y=(y_1,\dots,y_T)$ （プロンプト、回答。 $T$ は回答の長さ） | `prompts`, `world.responses` | – | `queries`, `responses` |
# | $r_\phi(x,y)$ （報酬モデルの点数） | `scores` | (B,)、数え上げでは (X, Y) | `scores` |
# | $\log\pi_\theta,\ \log\pi_{\theta_{\mathrm{old}}},\ \log\pi_{\mathrm{ref}}$ （トークンの対数確率） | `logps`, `old_logps`, `ref_logps` | (B, T)、系列では (X, Y) | `new_logprobs`, `logprobs`, `ref_logprobs` |
# | $\beta$ （KL ペナルティの係数） | `beta` | – | `kl_coef` |
# | $r_t$ （式 (4.10) のトークンごとの報酬） | `token_rewards` | (B, T) | `rewards` |
# | $V(s_t)$ （価値モデルの出力。 $s_t=(x,y_{<t})$ ） | `values` | (B, T) | `values`, `vpred` |
# | $\widehat A_t$ と、価値の目標 $\widehat A_t+V(s_t)$ | `advantages`, `returns` | (B, T) | `advantages`, `returns` |
# | $\epsilon$ （クリッピングの幅。方策と価値） | `epsilon` | – | `cliprange`, `cliprange_value` |
# | $\gamma,\ \lambda$ （割引率、GAE の係数） | `gamma`, `lam` | – | 同じ |
# | $\pi^*,\ Z(x)$ （(4.9) を最大にする方策、その正規化の定数） | `star_logps`, `log_Z` （対数） | (X, Y)、(X,) | – |
#
# B は回答の数、X はプロンプトの数、Y は数え上げた回答の数です。短い回答は右に詰め物をし、 `mask` を 0 にします。

# %% [markdown]
# ## 導出
#
# ### 全部を数え上げられる世界
#
# 各ステップを「実行」するために、とても小さな言語を用意します。文字は a と b の 2 つ、回答は最長 3 トークンで、EOS（ `$` と書きます）で終わるか、長さの上限で打ち切られます。打ち切られた回答も回答なので、確率の和はちょうど 1 です。
# 方策は、プロンプトと、それまでに書いた文字列（接頭辞）ごとに、次のトークンのロジットを並べた **表** です。参照方策も、報酬モデルの点数 $r_\phi(x,y)$ も、乱数で決めます。

# %%
from companion.exact import World

world = World(prompts=2, letters=2, max_length=3)
g = torch.Generator().manual_seed(0)
ref_logits = world.random_logits(g)
ref_logps = world.log_probs(ref_logits)  # log π_ref(y|x)  (X, Y)
scores = world.random_rewards(g)  # r_φ(x, y)  (X, Y)
print(len(world.responses), "通りの回答:", " ".join(world.responses))

# %% [markdown]
# ### ステップ 1：目的関数 (4.9) と、その最大点
#
# RLHF の目的関数は、点数の期待値から、参照方策との KL ダイバージェンスを引いたものです（ $\beta>0$ ）。
#
# $$
# J(\pi)=\mathbb{E}_{x\sim\rho}\Bigl[\mathbb{E}_{y\sim\pi(\cdot\mid x)}[r_\phi(x,y)]-\beta D_{\mathrm{KL}}[\pi(\cdot\mid x)\|\pi_{\mathrm{ref}}(\cdot\mid x)]\Bigr]
# \tag{4.9}
# $$
#
# $\rho$ はプロンプトの分布で、ここでは 2 つのプロンプトを半々とします。
#
# **主張** $J$ を最大にするのは、参照方策を点数の指数で傾けた方策です。
#
# $$
# \pi^*(y\mid x)=\frac{1}{Z(x)}\pi_{\mathrm{ref}}(y\mid x)\exp\Bigl(\frac{r_\phi(x,y)}{\beta}\Bigr),\qquad
# Z(x)=\sum_y\pi_{\mathrm{ref}}(y\mid x)\exp\Bigl(\frac{r_\phi(x,y)}{\beta}\Bigr)
# $$
#
# 最大値は $\beta\,\mathbb{E}_x[\log Z(x)]$ で、ほかのどの方策も、ちょうど $\beta\,\mathbb{E}_xD_{\mathrm{KL}}[\pi\|\pi^*]$ だけ低くなります。 $\pi^*$ の定義から $r_\phi=\beta\log\frac{\pi^*}{\pi_{\mathrm{ref}}}+\beta\log Z$ で、これを $J$ に代入すれば $J(\pi)=\beta\,\mathbb{E}_x[\log Z]-\beta\,\mathbb{E}_xD_{\mathrm{KL}}[\pi\|\pi^*]$ となるからです。

# %%
from companion.exact import expect, kl, log_partition, tilt

beta = 0.5
star_logps = tilt(ref_logps, scores / beta)
log_Z = log_partition(ref_logps, scores / beta)

# %%
def J(logps, scores=scores):
    """式 (4.9)。最後の次元が回答、その前がプロンプト。"""
    reward = expect(logps.exp(), scores)
    return (reward - beta * kl(logps, ref_logps)).mean(-1)

# %%
logps_200 = world.log_probs(world.random_logits(g, 200))  # (200, X, Y)
claim("J(π*) = β E[log Z(x)]", J(star_logps), beta * log_Z.mean())
shortfall = J(star_logps) - J(logps_200)
claim("J(π*) − J(π) = β E KL(π‖π*)", shortfall,
      beta * kl(logps_200, star_logps).mean(-1))
check("200 個の方策は、どれも π* より低い", shortfall.min() > 0,
      f"差は {shortfall.min():.3f} 以上")

# %% [markdown]
# **主張** プロンプトごとの定数 $c(x)$ を点数に足しても、 $\pi^*$ は動きません。最大値が $\mathbb{E}_x[c(x)]$ だけ上がるだけです。
# 一方、点数を $k$ 倍すると、 $\beta$ を $1/k$ 倍したのと同じだけ $\pi^*$ が動きます。つまり $\beta$ の適切な大きさは、報酬モデルの点数の **目盛り** で決まります。ほかの人の $\beta$ をそのまま使えないのは、このためです。

# %%
c = torch.tensor([[3.0], [-7.0]]).double()
claim("r + c(x) でも π* は同じ", tilt(ref_logps, (scores + c) / beta),
      star_logps)
claim("最大値は E[c(x)] だけ動く",
      J(star_logps, scores + c) - J(star_logps), c.mean())

# %%
tenth = world.logits_of(tilt(ref_logps, scores / (beta / 10)))
tenth.requires_grad_()
claim("点数が 10 倍のとき、β/10 の π* で J の勾配は 0",
      torch.autograd.grad(J(world.log_probs(tenth), 10 * scores), tenth)[0],
      0.0)

# %%
far = kl(tilt(ref_logps, 10 * scores / beta), star_logps).mean()
check("点数だけを 10 倍すると、別の方策になる", far > 0.1,
      f"KL {far:.2f} nat")

# %% [markdown]
# ### ステップ 2：点数と罰を、トークンに割り振る
#
# PPO は、トークンを一つ書くたびに報酬をもらう、という形の問題を解きます（2.3.5.2 節）。ところが (4.9) の点数は、回答が終わってから一つもらえるだけです。そこで、罰はトークンごとに分け、点数は **最後のトークン** に足します。
#
# $$
# r_t=-\beta\log\frac{\pi_\theta(y_t\mid x,y_{<t})}{\pi_{\mathrm{ref}}(y_t\mid x,y_{<t})}+
# \begin{cases}r_\phi(x,y)&(t=T)\\0&(t<T)\end{cases}
# \tag{4.10}
# $$
#
# `kl_penalized_rewards` は、これを計算するパッケージの関数です（中身は「実装」で読みます）。世界のすべての回答に使えるように包んでおきます。

# %%
from companion.losses import kl_penalized_rewards

ref_tokens = world.token_log_probs(ref_logits)  # (X, Y, T)


def token_rewards_of(tokens):
    """トークンの対数確率 (…, X, Y, T) から、式 (4.10) の報酬。"""
    wide = [t.expand(tokens.shape).flatten(0, -2)
            for t in (tokens, ref_tokens, world.mask)]
    of_rows = scores.expand(tokens.shape[:-1]).flatten()
    return kl_penalized_rewards(of_rows, *wide, beta).view(tokens.shape)


# %% [markdown]
# 1 つ目のプロンプトへの回答を 2 つ見ます。 `ab$` は EOS で終わった回答、 `abb` は打ち切られた回答です。どちらも、点数は最後のトークンに入ります。

# %%
import pandas as pd

one_theta = world.random_logits(g)
one_tokens = world.token_log_probs(one_theta)  # ある方策
one_rewards = token_rewards_of(one_tokens)

# %%
shown = []
for response in ("ab$", "abb"):
    y = world.responses.index(response)
    for t, token in enumerate(response):
        shown.append({
            "回答": response, "点数": scores[0, y].item(), "トークン": token,
            "log π": one_tokens[0, y, t].item(),
            "log π_ref": ref_tokens[0, y, t].item(),
            "r_t": one_rewards[0, y, t].item(),
        })
pd.DataFrame(shown).round(3)

# %% [markdown]
# **主張** $\gamma=1$ なら、どの方策のどの回答でも、トークンの報酬の和は $r_\phi(x,y)-\beta\log\frac{\pi_\theta(y\mid x)}{\pi_{\mathrm{ref}}(y\mid x)}$ です。したがって、その期待値は式 (4.9) です。

# %%
tokens_200 = world.token_log_probs(world.random_logits(g, 200))
logps_200 = tokens_200.sum(-1)
sums = token_rewards_of(tokens_200).sum(-1)
claim("Σ_t r_t = r_φ − β log(π/π_ref)（200 方策 × 30 回答）", sums,
      scores - beta * (logps_200 - ref_logps))
claim("E[Σ_t r_t] = (4.9)", expect(logps_200.exp(), sums).mean(-1),
      J(logps_200))

# %% [markdown]
# **条件** $\gamma<1$ では成り立ちません。 $\sum_t\gamma^{t-1}r_t$ では、後のトークンの罰も、最後に来る点数も割り引かれるからです。

# %%
gamma = 0.9
powers = gamma ** torch.arange(3).double()
discounted = (powers * token_rewards_of(tokens_200)).sum(-1)
off = (expect(logps_200.exp(), discounted).mean(-1) - J(logps_200)).abs()
check(f"γ = {gamma}: 期待値は (4.9) と違う", off.quantile(0.5) > 0.02,
      f"ずれの中央値 {off.quantile(0.5):.3f}、最大 {off.max():.3f}")

# %% [markdown]
# ### ステップ 3：報酬の中の KL は、微分しなくてよい
#
# 式 (4.10) の報酬には、学習中の $\pi_\theta$ が入っています。それなのに PPO は、報酬をただの **データ** として扱い、そこには勾配を流しません。よいのでしょうか。
#
# $$
# \nabla J=\mathbb{E}_{y\sim\pi_\theta}\Bigl[\Bigl(r_\phi-\beta\log\frac{\pi_\theta}{\pi_{\mathrm{ref}}}\Bigr)\nabla\log\pi_\theta\Bigr]-\beta\,\mathbb{E}_{y\sim\pi_\theta}[\nabla\log\pi_\theta]
# $$
#
# 積の微分で出てくる 2 つ目の項が、報酬の中の $\pi_\theta$ を微分した分です。 $\mathbb{E}[\nabla\log\pi_\theta]=\nabla\sum_y\pi_\theta(y)=0$ なので、消えます。
#
# **主張** 報酬をデータとして扱った勾配は、式 (4.9) の勾配と等しくなります。

# %%
def slope(objective, theta):
    return torch.autograd.grad(objective, theta, retain_graph=True)[0]

# %%
theta = world.random_logits(g).requires_grad_()
tokens = world.token_log_probs(theta)
logps = tokens.sum(-1)
as_data = token_rewards_of(tokens).sum(-1)  # 勾配は流れない
wanted = slope(J(logps), theta)
claim("E[(Σ r_t) ∇log π] = ∇(4.9)",
      slope(expect(logps.exp(), as_data).mean(), theta), wanted)

# %% [markdown]
# これは、罰が対数確率比 $\log\frac{\pi_\theta}{\pi_{\mathrm{ref}}}$ **そのもの** だから成り立ちます。KL の推定量（平均すると KL、またはその近くになる量）は、ほかにもあります。 $d_t=\log\pi_{\mathrm{ref}}(y_t\mid\cdot)-\log\pi_\theta(y_t\mid\cdot)$ と書くと、
#
# $$
# k_1=-d_t,\qquad k_2=\tfrac12d_t^2,\qquad k_3=e^{d_t}-1-d_t
# $$
#
# です。式 (4.10) は $k_1$ を使っています。TRL では `kl_estimator="k3"` も選べます。 $k_3$ は負にならず、値のばらつきが小さいので、よさそうに見えます。

# %%
def estimators(tokens):
    d = torch.where(world.mask, ref_tokens - tokens, 0.0)
    return {"k1": -d, "k2": d**2 / 2, "k3": torch.expm1(d) - d}

# %%
true_kl = kl(logps, ref_logps).mean()
kl_slope = slope(true_kl, theta)
three = {}
for name, k in estimators(tokens).items():
    penalty = k.sum(-1).detach()  # データとして扱う
    mean = expect(logps.exp(), penalty).mean()
    off = (slope(mean, theta) - kl_slope).norm() / kl_slope.norm()
    three[name] = {"値": mean.item(), "勾配の相対的なずれ": off.item()}

# %%
print(f"KL(π‖π_ref) = {true_kl:.4f}")
table = pd.DataFrame(three).T
claim("k1、k3 の平均は KL", table.loc[["k1", "k3"], "値"], true_kl)
check("k2 の平均は KL ではない",
      abs(table.loc["k2", "値"] - true_kl) > 0.02)
claim("k1: 報酬に入れたときの勾配は正しい",
      table.loc["k1", "勾配の相対的なずれ"], 0.0)

# %%
check("k2、k3: 正しくない",
      table["勾配の相対的なずれ"][1:].min() > 0.3)
table.round(4)

# %% [markdown]
# $k_3$ は **平均が正しいのに、勾配は正しくありません**。報酬の期待値の勾配は $\mathbb{E}[k\,\nabla\log\pi_\theta]$ で、落とした項 $\mathbb{E}[\nabla k]$ が、 $k_1$ では 0 でも、 $k_2$ と $k_3$ では 0 にならないからです。
#
# 手計算できる例で確かめましょう。1 トークン、選択肢 2 つ、 $\pi=(.5,.5)$、 $\pi_{\mathrm{ref}}=(.2,.8)$ です。ロジットは 2 つ目の選択肢だけを動かすとすると、スコア $\nabla\log\pi$ は $(-.5,+.5)$ です。 $\nabla D_{\mathrm{KL}}[\pi\|\pi_{\mathrm{ref}}]=-\frac14\log4=-.3466$、逆向きの $\nabla D_{\mathrm{KL}}[\pi_{\mathrm{ref}}\|\pi]=-.3$ です。
#
# **主張** 1 トークンなら、 $k_3$ を報酬に入れた勾配は、両向きの KL の **差** の勾配 $\nabla\bigl(D_{\mathrm{KL}}[\pi\|\pi_{\mathrm{ref}}]-D_{\mathrm{KL}}[\pi_{\mathrm{ref}}\|\pi]\bigr)$ です。

# %%
import math

p2, q2 = torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
d2 = q2.log() - p2.log()
score2 = torch.tensor([-0.5, 0.5]).double()

# %%
for name, k, expected in (
    ("k1", -d2, -math.log(4) / 4),
    ("k2", d2**2 / 2, (math.log(1.6)**2 - math.log(2.5)**2) / 8),
    ("k3", d2.exp() - 1 - d2, -math.log(4) / 4 + 0.3),
):
    claim(f"{name}: E[k ∇log π]", (p2 * k * score2).sum(), expected)

# %%
letter = World(prompts=1, letters=3, max_length=1)
letter_ref = letter.log_probs(letter.random_logits(g))
letter_theta = letter.random_logits(g).requires_grad_()
letter_logps = letter.log_probs(letter_theta)
d = letter_ref - letter_logps

# %%
k3_as_data = (d.exp() - 1 - d).detach()
both_ways = kl(letter_logps, letter_ref) - kl(letter_ref, letter_logps)
claim("1 トークン: k3 の勾配 = ∇(KL(π‖π_ref) − KL(π_ref‖π))",
      slope(expect(letter_logps.exp(), k3_as_data).sum(), letter_theta),
      slope(both_ways.sum(), letter_theta))

# %% [markdown]
# 両向きの KL は、 $\pi_{\mathrm{ref}}$ の近くでは 2 次まで同じなので、差はほとんど残りません。参照方策の近くでは、罰の勾配がほとんど消えてしまうのです。 $k_2$ でも、回答が長くても、そうなります。同じ向きに $h$ だけ離れたところで、勾配の大きさを比べます。

# %%
noise = world.random_logits(g)
sizes = {}

# %%
for h in (0.1, 0.05):
    near = (ref_logits + h * noise).requires_grad_()
    near_tokens = world.token_log_probs(near)
    for name, k in estimators(near_tokens).items():
        penalty = k.sum(-1).detach()
        mean = expect(near_tokens.sum(-1).exp(), penalty).mean()
        sizes[name, h] = slope(mean, near).norm().item()

# %%
for name, power in (("k1", 2), ("k2", 4), ("k3", 4)):
    fall = sizes[name, 0.1] / sizes[name, 0.05]
    check(f"{name}: 距離を半分にすると、罰の勾配は約 1/{power}",
          abs(fall / power - 1) < 0.15,
          f"{sizes[name, 0.1]:.5f} → {sizes[name, 0.05]:.5f}")

# %% [markdown]
# 図にすると、違いの元が見えます。 $k_1$ は、方策が参照方策より **出しにくくなった** トークン（図の左半分）で負になり、罰ではなく褒美を与えて呼び戻します。 $k_2$ と $k_3$ は負にならないので、出しにくくなったトークンにも罰を与え、ますます出しにくくします。
# 値のばらつきが小さいことと、報酬に入れたときに正しい勾配を与えることは、別の話です。KL を損失のほうに入れる場合は、5.3.1 節（GRPO）で扱います。

# %%
from companion.plots import COLOURS, GREY, figure

ratio_line = torch.linspace(-2.2, 2.2, 111)
drawn, ((ax,),) = figure(1, 1, panel=(5.6, 3.0))
for name, values in (("k1", ratio_line), ("k2", ratio_line**2 / 2),
                     ("k3", torch.expm1(-ratio_line) + ratio_line)):
    ax.plot(ratio_line, values, label=name)
ax.axhline(0, color=GREY, linewidth=0.8)
ax.axvline(0, color=GREY, linewidth=0.8)
ax.set(title="1 トークンの罰（β を掛ける前）", ylim=(-2.3, 4.2),
       xlabel="log(π/π_ref)：右ほど、参照方策より出やすくなった",
       ylabel="罰（負なら褒美）")
ax.legend(loc="upper center", ncols=3)
drawn

# %% [markdown]
# ステップ 2 の $\gamma<1$ に戻りましょう。勾配を見れば、行き先まで変わることが分かります。
#
# **主張** 割り引いた収益 $\sum_t\gamma^{t-1}r_t$ の期待値の勾配は、 $\pi^*$ で、 $\gamma=1$ なら 0 です。 $\gamma=0.9$ では、この世界では 0 になりません。

# %%
star_theta = world.logits_of(star_logps).requires_grad_()
star_tokens = world.token_log_probs(star_theta)
star_rewards = token_rewards_of(star_tokens)
for gamma in (1.0, 0.9):
    powers = gamma ** torch.arange(3).double()
    back = (powers * star_rewards).sum(-1)
    size = slope(
        expect(star_tokens.sum(-1).exp(), back).mean(), star_theta
    ).norm()
    if gamma == 1:
        claim("γ = 1: π* で勾配は 0", size, 0.0, tol=1e-12)
    else:
        check(f"γ = {gamma}: π* で 0 でない", size > 1e-2, f"{size:.3f}")

# %% [markdown]
# ### ステップ 4：報酬からアドバンテージへ
#
# PPO は、トークンの報酬 $r_t$ と価値 $V(s_t)$ から、GAE でアドバンテージ $\widehat A_t$ を作ります（2.3.5.2 節）。TD 誤差 $\delta_t=r_t+\gamma V(s_{t+1})-V(s_t)$ を後ろから足し、 $\widehat A_t=\delta_t+\gamma\lambda\widehat A_{t+1}$ とします。 `gae` はそれを計算する関数です。回答が終わった後の価値は 0 です。
#
# アドバンテージを使うのが、PPO の式 (2.29) です。 $w_t(\theta)=\frac{\pi_\theta(y_t\mid\cdot)}{\pi_{\theta_{\mathrm{old}}}(y_t\mid\cdot)}$ を、生成時の方策 $\pi_{\theta_{\mathrm{old}}}$ に対する重要度比として、
#
# $$
# \min\Bigl\{w_t(\theta)\widehat A_t,\ \mathrm{clip}\bigl(w_t(\theta),1-\epsilon,1+\epsilon\bigr)\widehat A_t\Bigr\}
# \tag{2.29}
# $$
#
# をトークンについて平均したものを上げます。
#
# **主張** $\gamma=\lambda=1$ なら、 **どんな $V$ でも**、 $\mathbb{E}\bigl[\sum_t\widehat A_t\nabla\log\pi_\theta(y_t\mid\cdot)\bigr]$ は式 (4.9) の勾配です。2.3.5.2 節のとおり、これは、式 (2.29) を（トークンについて平均でなく和にして）生成時の方策で微分したものです。つまり、(4.10) → GAE → (2.29) とたどると、(4.9) を上る勾配になります。

# %%
from companion.losses import gae


def advantages_of(tokens, table, lam):
    """報酬 (4.10) と、接頭辞の価値の表 (X, 接頭辞) から、Â_t。"""
    values = torch.where(world.mask, table[:, world.prefixes], 0.0)
    rows = [t.expand(tokens.shape).flatten(0, -2)
            for t in (token_rewards_of(tokens), values, world.mask)]
    return gae(*rows, lam=lam)[0].view(tokens.shape)

# %%
def gae_slope(table, lam):
    A = advantages_of(tokens, table, lam)
    return slope(expect(logps.exp().detach(), (A * tokens).sum(-1)).mean(),
                 theta)

# %%
any_V = torch.randn(2, world.num_prefixes, generator=g).double()
claim("λ = 1: E[Σ_t Â_t ∇log π] = ∇(4.9)", gae_slope(any_V, 1.0), wanted)
off = (gae_slope(any_V, 0.95) - wanted).norm() / wanted.norm()
check("λ = .95 では、でたらめな V のせいで偏る", off > 0.005, f"{off:.1%}")

# %% [markdown]
# 学習が $\pi^*$ に着いたら、アドバンテージはどうなるでしょうか。接頭辞 $s$ から先の回答だけで、ステップ 1 の $\beta\log Z$ を作ります。
#
# $$
# V^*(s)=\beta\log\sum_{y\,:\,s\text{ で始まる}}\pi_{\mathrm{ref}}(y\mid s)\exp\Bigl(\frac{r_\phi(x,y)}{\beta}\Bigr)
# $$
#
# **主張** $\gamma=1$、価値が $V^*$、方策が $\pi^*$ なら、どの回答のどのトークンでも $\delta_t=0$ です。したがって、 $\lambda$ がいくつでも、 **アドバンテージは全部 0** です。 $\pi^*$ は、KL の罰と点数がどのトークンでも釣り合っている方策なのです。

# %%
prefix_of = {world.prefixes[i, t].item(): y[:t]
             for i, y in enumerate(world.responses) for t in range(len(y))}

# %%
begins = torch.tensor([
    [y.startswith(prefix_of[k]) for y in world.responses]
    for k in range(world.num_prefixes)
])  # (接頭辞, Y)


def log_mass(logs):
    """接頭辞で始まる回答の exp の和の対数 (X, 接頭辞)。"""
    return logs[:, None].masked_fill(~begins, -torch.inf).logsumexp(-1)


star_V = beta * (log_mass(ref_logps + scores / beta) - log_mass(ref_logps))

# %%
start = world.prefixes[0, 0]  # 空の接頭辞
claim("V*(x) = β log Z(x)", star_V[:, start], beta * log_Z)
for lam in (0.0, 0.95, 1.0):
    claim(f"λ = {lam}: π* では Â_t = 0",
          advantages_of(star_tokens, star_V, lam), 0.0)

# %%
size = advantages_of(ref_tokens, star_V, 0.95)[..., world.mask].abs()
check("参照方策では 0 でない", size.mean() > 0.1,
      f"平均の大きさ {size.mean():.3f}")

# %% [markdown]
# ### ステップ 5：二重に数えない
#
# KL の罰は、報酬に入れるか、損失に入れるかの **どちらか** です。報酬 (4.10) に入れたうえで、損失にも $\beta D_{\mathrm{KL}}$ を足すと、罰が二重になります。
#
# **主張** 両方に入れると、勾配が 0 になるのは $2\beta$ の $\pi^*$ です。

# %%
twice_logps = tilt(ref_logps, scores / (2 * beta))

# %%
def doubled_slope(logits):
    theta = logits.detach().clone().requires_grad_()
    tokens = world.token_log_probs(theta)
    logps = tokens.sum(-1)
    in_reward = token_rewards_of(tokens).sum(-1)
    in_loss = beta * kl(logps, ref_logps).mean()
    objective = expect(logps.exp(), in_reward).mean() - in_loss
    return slope(objective, theta)

# %%
claim("2β の π* で勾配は 0",
      doubled_slope(world.logits_of(twice_logps)), 0.0, tol=1e-12)
size = doubled_slope(star_theta).norm()
check("β の π* では 0 でない", size > 0.1, f"{size:.3f}")

# %%
lost = J(star_logps) - J(twice_logps)
claim("失うのは β KL(π_2β‖π*)", lost,
      beta * kl(twice_logps, star_logps).mean())

# %% [markdown]
# TRL の `PPOTrainer` には、損失に KL を足す設定がありません。自分で書いた報酬に KL を入れていたら、 `kl_coef=0.0` にしてください。
#
# ### ステップ 6：4 つのモデル
#
# ここまでに、モデルが 4 つ出てきました。1 回の更新で、それぞれが何をするのかを図にします。青は更新されるモデル、灰色は固定されたモデル、点線の枠は計算です。破線の矢印は、損失がどのモデルを更新するかを表します。

# %%
boxes = {  # 名前 -> 中心と、更新されるか（None は計算）
    r"方策 $\pi_\theta$": (1.9, 3.6, True),
    r"報酬モデル $r_\phi$": (5.0, 5.3, False),
    r"参照方策 $\pi_{\mathrm{ref}}$": (5.0, 2.4, False),
    "価値モデル V": (5.0, 1.0, True),
    "報酬 $r_t$\n式 (4.10)": (8.2, 3.6, None),
    "アドバンテージ\n（GAE）": (8.2, 1.5, None),
}

# %%
arrows = [  # 始点、終点、文字、文字の場所
    ((0.3, 3.6), (1.25, 3.6), "x", (0.7, 3.85)),
    ((2.3, 4.0), (4.15, 5.1), "y", (3.0, 4.75)),
    ((2.5, 3.2), (4.1, 2.6), "y", (3.5, 3.08)),
    ((2.2, 3.15), (4.15, 1.25), "y", (3.2, 1.85)),
    ((5.9, 5.1), (7.7, 4.1), r"$r_\phi(x,y)$", (7.2, 4.85)),
    ((2.6, 3.6), (7.55, 3.6), r"$\log\pi_\theta$", (5.0, 3.85)),
    ((5.95, 2.6), (7.55, 3.3), r"$\log\pi_{\mathrm{ref}}$", (6.9, 2.7)),
    ((5.85, 1.05), (7.2, 1.4), "$V(s_t)$", (6.45, 1.45)),
    ((8.2, 3.1), (8.2, 2.05), "$r_t$", (8.4, 2.6)),
]
losses = {  # 名前 -> 折れ線、文字の場所
    "価値の損失": ([(8.4, 1.0), (8.4, 0.15), (5.0, 0.15), (5.0, 0.55)],
               (6.2, 0.25)),
    "方策の損失 (2.29)": ([(8.7, 1.0), (8.7, -0.45), (1.7, -0.45),
                       (1.7, 3.15)], (2.3, -0.35)),
}

# %%
drawn, ((ax,),) = figure(1, 1, panel=(7.6, 4.0))
ax.set(xlim=(0.1, 9.3), ylim=(-0.6, 5.7))
ax.set_axis_off()
for name, (x, y, learns) in boxes.items():
    style = dict(boxstyle="round,pad=0.5", facecolor="white",
                 edgecolor=COLOURS[0] if learns else GREY,
                 linestyle="-" if learns is not None else ":")
    if learns is not None:
        style["facecolor"] = "#E3F0F8" if learns else "#EDEDED"
    ax.text(x, y, name, ha="center", va="center", bbox=style)
for start_at, end_at, label, place in arrows:
    ax.annotate("", end_at, start_at,
                arrowprops=dict(arrowstyle="->", color="#777777"))
    ax.text(*place, label, ha="center", va="center", fontsize=9.5)
for label, (corners, place) in losses.items():
    ax.plot(*zip(*corners, strict=True), "--", color=COLOURS[0],
            linewidth=1.2)
    ax.plot(*corners[-1], "^", color=COLOURS[0], markersize=6)
    ax.text(*place, label, color=COLOURS[0], fontsize=9.5)
drawn

# %% [markdown]
# 1. **方策** が、プロンプト $x$ に回答 $y$ を書きます。
# 2. **報酬モデル** （4.4.2 節で学習したもの、固定）が、回答に点数を付けます。
# 3. **参照方策** （SFT 済みの方策の写し、固定）が、同じトークンの対数確率を計算します。1〜3 から、式 (4.10) の報酬が決まります。
# 4. **価値モデル** が、各トークンの手前で、先の報酬の見込み $V(s_t)$ を出します。報酬と合わせて GAE でアドバンテージを作り、方策は式 (2.29) で、価値モデルは $\widehat A_t+V(s_t)$ への 2 乗誤差で更新します。同じ回答で何度か更新したら、1 に戻ります。
#
# 報酬モデルと価値モデルは、どちらも出力が 1 つの系列分類モデルですが、役割が違います。報酬モデルは回答の **終わり** で 1 つ点数を付け、学習の間変わりません。価値モデルは **すべてのトークン** で値を出し、方策が変わるたびに学びなおします。
#
# ### ステップ 7：報酬と KL のフロンティア
#
# 使ってよい KL の量を決めたとき、点数の期待値はどこまで上げられるでしょうか。答えは、 $\beta$ を動かしたときの $\pi^*$ が描く線（ **フロンティア** ）です。ステップ 1 の $J(\pi)\le\beta\,\mathbb{E}_x[\log Z]$ を書き直すと、どの方策でも、どの $\beta$ でも
#
# $$
# \mathbb{E}[r_\phi]\le\beta\,\mathbb{E}_x[\log Z(x)]+\beta\,\mathbb{E}_xD_{\mathrm{KL}}[\pi\|\pi_{\mathrm{ref}}]
# $$
#
# だからです。右辺を $\beta$ で最小にしたところが、フロンティアの高さです。

# %%
def kl_and_reward(logps, ref_logps=ref_logps, scores=scores):
    reward = expect(logps.exp(), scores).mean(-1)
    return kl(logps, ref_logps).mean(-1), reward

# %%
betas = torch.logspace(-1, 2, 60).double()
many_Z = log_partition(ref_logps, scores / betas[:, None, None]).mean(-1)
spent, gained = kl_and_reward(logps_200)
slack = betas[:, None] * (many_Z[:, None] + spent) - gained
check("200 個の方策は、どの β の直線より下にある", slack.min() > 0,
      f"余裕は {slack.min():.3f} 以上")

# %%
b = torch.tensor(0.5).double().requires_grad_()
best_J = (b * log_partition(ref_logps, scores / b)).mean()
star_kl, star_reward = kl_and_reward(star_logps)
claim("d(β E log Z)/dβ = −KL(π*‖π_ref)", slope(best_J, b), -star_kl)

# %%
spent_b, gained_b = kl_and_reward(tilt(ref_logps, scores / b))
incline = slope(gained_b, b) / slope(spent_b, b)
claim("フロンティアの傾き dE[r]/dKL は β", incline, beta)

# %% [markdown]
# 方策を学習せずに点数を使う方法もあります。参照方策から $n$ 個引いて、点数が一番高いものを選ぶ **best-of-n** です。4.4.2 節でも使いました。同点がなければ、選ばれる確率は、点数が $y$ 以下、 $y$ 未満である確率 $F_{\le}(y),\ F_{<}(y)$ を使って
#
# $$
# P_n(y\mid x)=F_{\le}(y)^n-F_{<}(y)^n
# $$
#
# と正確に書けます。 $n=3$ のときを、 $15^3$ 通りの数え上げと比べます。

# %%
def best_of(n, ref_logps=ref_logps, scores=scores):
    """best-of-n の対数確率 (X, Y)。同点はないとする。"""
    below = scores[:, None, :] < scores[:, :, None]
    F_less = (below * ref_logps.exp()[:, None, :]).sum(-1)
    F_up_to = F_less + ref_logps.exp()
    return (F_up_to**n - F_less**n).log()

# %%
triples = torch.cartesian_prod(*[torch.arange(15)] * 3)
chance = ref_logps.exp()[:, triples].prod(-1)  # (X, 15³)
winner = triples.gather(1, scores[:, triples].argmax(-1).T).T
counted = torch.zeros_like(scores).scatter_add(1, winner, chance)
claim("best-of-3 = 数え上げ", best_of(3).exp(), counted)
claim("Σ_y P_n(y) = 1", best_of(16).exp().sum(-1), torch.ones(2))

# %% [markdown]
# KL も正確に計算できます。よく使われる $\log n-\frac{n-1}n$ は、どの回答の確率も限りなく小さいときの値で、一般には **上限** でしかありません。

# %%
counts = (2, 4, 16, 64)
exact_kl = torch.stack([kl(best_of(n), ref_logps) for n in counts])
n_s = torch.tensor(counts).double()
bound = n_s.log() - (n_s - 1) / n_s
check("どのプロンプト、どの n でも、KL は log n − (n−1)/n より小さい",
      (exact_kl < bound[:, None] - 1e-3).all())

# %%
for n, b, value in zip(counts, bound, exact_kl.mean(-1), strict=True):
    print(f"n = {n:2d}: KL の平均 {value:.3f}、上限 {b:.3f}")

# %% [markdown]
# best-of-n の点数がフロンティアにどれだけ近いかは、実験 2 で見ます。
#
# ## 実装
#
# 式 (4.10) と GAE を、そのまま NumPy で書きます。回答の長さはまちまちなので、「回答ごとの列」をリストに入れて渡します。

# %%
import numpy as np


def kl_penalized_rewards_numpy(scores, logps, ref_logps, beta):
    token_rewards = []
    for i in range(len(scores)):
        T = len(logps[i])
        r = [-beta * (logps[i][t] - ref_logps[i][t]) for t in range(T)]
        r[T - 1] += scores[i]  # 点数は最後のトークンに
        token_rewards.append(np.array(r))
    return token_rewards

# %%
def gae_numpy(rewards, values, gamma, lam):
    advantages = []
    for r, V in zip(rewards, values, strict=True):
        T = len(r)
        V = [*V, 0.0]  # 回答の後の価値は 0
        delta = [r[t] + gamma * V[t + 1] - V[t] for t in range(T)]
        advantages.append(np.array([
            sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, T))
            for t in range(T)
        ]))
    return advantages


# %% [markdown]
# アドバンテージは、1 回に集めた回答の全トークンで平均 0、分散 1 にそろえてから使うのが普通です（白色化、whitening）。続けて、方策の損失 (2.29) と価値の損失です。

# %%
def whiten_numpy(advantages):
    x = np.concatenate(advantages)
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / (len(x) - 1)
    return [(a - mean) / np.sqrt(variance + 1e-8) for a in advantages]

# %%
def policy_loss_numpy(logps, old_logps, advantages, epsilon):
    total, tokens = 0.0, 0
    for i in range(len(logps)):
        for t in range(len(logps[i])):
            w = np.exp(logps[i][t] - old_logps[i][t])
            A = advantages[i][t]
            total += min(w * A, np.clip(w, 1 - epsilon, 1 + epsilon) * A)
            tokens += 1
    return -total / tokens

# %%
def value_loss_numpy(values, old_values, returns, epsilon):
    total, tokens = 0.0, 0
    for i in range(len(values)):
        for V, old, R in zip(values[i], old_values[i], returns[i],
                             strict=True):
            clipped = np.clip(V, old - epsilon, old + epsilon)
            total += max((V - R) ** 2, (clipped - R) ** 2)
            tokens += 1
    return total / (2 * tokens)


# %% [markdown]
# 価値の損失のクリッピングは、式 (2.29) にはない、実装の習慣です。動かした値と、前の値の $\pm\epsilon$ に押し込めた値の、誤差が **大きいほう** をとるので、目標へ向かって $\epsilon$ より動くと（目標を大きく通り過ぎないかぎり）勾配が止まります。
#
# パッケージの関数は、同じ式をベクトルで書いた PyTorch 版です。説明の文を省いて表示します。前半は入力の検査です。

# %%
import inspect

from companion.losses import ppo_policy_loss, ppo_value_loss, whiten

for function in (kl_penalized_rewards, ppo_value_loss):
    code = inspect.getsource(function).split('"""')
    print(code[0].rstrip() + code[2])

# %% [markdown]
# 長さの違う 4 つの回答で比べます。詰め物のところには、わざと NaN を入れておきます。

# %%
rng = np.random.default_rng(0)
lengths = (3, 5, 1, 4)


def ragged(scale=1.0):
    return [scale * rng.normal(size=n) for n in lengths]

# %%
def padded(rows):
    tensors = [torch.as_tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(
        tensors, batch_first=True, padding_value=torch.nan)


mask = torch.arange(5) < torch.tensor(lengths)[:, None]

# %%
old = [-np.abs(row) for row in ragged()]
new = [a + b for a, b in zip(old, ragged(0.3), strict=True)]
ref = [-np.abs(row) for row in ragged()]
V_old, points = ragged(), rng.normal(size=4)
V_new = [a + b for a, b in zip(V_old, ragged(0.3), strict=True)]

# %%
def on_tokens(table):
    return table[mask].numpy()

# %%
r_np = kl_penalized_rewards_numpy(points, old, ref, beta=0.1)
r_torch = kl_penalized_rewards(
    torch.as_tensor(points), padded(old), padded(ref), mask, 0.1)
claim("報酬 (4.10): NumPy = PyTorch", np.concatenate(r_np),
      on_tokens(r_torch), tol=1e-12)

# %%
A_np = gae_numpy(r_np, V_old, gamma=0.9, lam=0.8)
A_torch, R_torch = gae(r_torch, padded(V_old), mask, 0.9, 0.8)
claim("GAE: NumPy = PyTorch", np.concatenate(A_np), on_tokens(A_torch),
      tol=1e-12)

# %%
W_np, W_torch = whiten_numpy(A_np), whiten(A_torch, mask)
claim("白色化: NumPy = PyTorch", np.concatenate(W_np), on_tokens(W_torch),
      tol=1e-12)

# %%
R_np = [a + v for a, v in zip(A_np, V_old, strict=True)]
claim("方策の損失: NumPy = PyTorch",
      policy_loss_numpy(new, old, W_np, 0.2),
      ppo_policy_loss(padded(new), padded(old), W_torch, mask, 0.2),
      tol=1e-12)

# %%
claim("価値の損失: NumPy = PyTorch",
      value_loss_numpy(V_new, V_old, R_np, 0.2),
      ppo_value_loss(padded(V_new), padded(V_old), R_torch, mask, 0.2),
      tol=1e-12)

# %% [markdown]
# 勾配は、数値微分と比べます。詰め物の NaN は、勾配にも漏れません。

# %%
def filled(rows):  # gradcheck は NaN の上を動けないので、0 を入れる
    return padded(rows).nan_to_num(0.0)


logps_leaf, values_leaf = (filled(x).requires_grad_() for x in (new, V_new))

# %%
check("方策の損失: 自動微分 = 数値微分", torch.autograd.gradcheck(
    lambda x: ppo_policy_loss(x, filled(old), W_torch, mask, 0.2),
    logps_leaf))
check("価値の損失: 自動微分 = 数値微分", torch.autograd.gradcheck(
    lambda x: ppo_value_loss(x, filled(V_old), R_torch, mask, 0.2),
    values_leaf))

# %%
leaf = padded(new).requires_grad_()
ppo_policy_loss(leaf, padded(old), W_torch, mask, 0.2).backward()
check("詰め物の勾配は 0", (leaf.grad[~mask] == 0).all())
check("報酬に勾配は流れない", not kl_penalized_rewards(
    torch.zeros(1), leaf[:1], leaf[:1].detach(), mask[:1], 0.1).requires_grad)

# %% [markdown]
# 手計算とも合わせます。報酬 $(0,0,1)$、価値 $(.5,.6,.7)$、 $\gamma=1$、 $\lambda=.95$ です。

# %%
def double(values):
    return torch.tensor(values, dtype=torch.float64)


A, R = gae(double([[0.0, 0.0, 1.0]]), double([[0.5, 0.6, 0.7]]),
           torch.ones(1, 3))
claim("Â", A, [[0.46575, 0.385, 0.3]])
claim("目標 Â + V", R, [[0.96575, 0.985, 1.0]])

# %% [markdown]
# 間違った入力には、どこが悪いかを言うエラーを出します。点数を置くトークンが一つもない回答は、黙って 0 点にはしません。

# %%
def error_of(build):
    try:
        build()
    except (ValueError, OSError, ImportError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:64]}"
    return "エラーになりません"

# %%
holes = mask.clone()
holes[2] = False
message = error_of(lambda: kl_penalized_rewards(
    torch.as_tensor(points), padded(old), padded(ref), holes, 0.1))
check("空の回答は断る", "mask[2]" in message, message)

# %% [markdown]
# ## TRL との照合
#
# ### 同じモデル、同じ回答で、途中の値と勾配を比べる
#
# 相手は TRL の `PPOTrainer` そのものです。 `trl_ppo` は、TRL に一度だけ回答を書かせて学習させ、 `train()` の途中の変数（報酬、価値、アドバンテージ、損失とその勾配）を読み取って返します。
# モデルは、どれも float64 の小さなものです。参照方策は、方策の重みを少し動かしたもの、報酬モデルと価値モデルは、SFT 済みのモデルに乱数の線形層を載せたものです。クリッピングが働くように、同じ回答で 2 回（2 エポック）更新し、幅を狭くします。

# %%
import copy

from companion.lm import load
from companion.training import new_reward_model

model, tokenizer = load("prime-sums", dtype=torch.float64)
ref_model = copy.deepcopy(model)
with torch.no_grad():
    for p in ref_model.parameters():
        p += 0.2 * p.std() * torch.randn(p.shape, generator=g, dtype=p.dtype)

# %%
reward_model, value_model = (
    new_reward_model("prime-sums", seed=s).double() for s in (2, 3))
questions = [f"{n}未満の素数の合計は？"
             for n in (12, 20, 30, 45, 64, 77, 98, 99)]
prompts = tokenizer(questions)["input_ids"]

# %%
from contextlib import redirect_stdout
from io import StringIO

from companion.oracle import trl_ppo

# %%
EPSILON = 0.05


def ask_trl(prompts=prompts, tokenizer=tokenizer, **changes):
    settings = dict(
        num_ppo_epochs=2, response_length=4, temperature=1.0, kl_coef=0.05,
        learning_rate=1e-3, cliprange=EPSILON, cliprange_value=EPSILON)
    with redirect_stdout(StringIO()):  # TRL の見出しを出さない
        return trl_ppo(model, ref_model, reward_model, value_model, prompts,
                       tokenizer, **settings | changes)

# %%
if with_trl("TRL に 1 回分の学習をさせる"):
    theirs = ask_trl()
    print("回答の長さ:", theirs.mask.sum(-1).tolist())
    print("点数:", [f"{x:.2f}" for x in theirs.scores])

# %% [markdown]
# 回答の長さはまちまちで、上限の 4 トークンで打ち切られたものもあります。TRL の対数確率、価値、アドバンテージを NumPy と PyTorch の関数に渡し、結果を比べます。
# TRL は点数を置く場所が式と違うので（次の「式と TRL の違い」で見ます）、報酬は KL の部分だけを比べます。

# %%
comparison = {}


def compare(name, by_numpy, by_torch, by_trl):
    """3 つの値を比べて、表の 1 行（値の大きさと最大差）にする。"""
    three = [np.concatenate([np.ravel(x) for x in values])
             for values in (by_numpy, by_torch, by_trl)]
    gap = max(np.abs(three[k] - three[2]).max() for k in (0, 1))
    check(f"{name}: NumPy = PyTorch = TRL", gap <= 1e-12,
          f"{len(three[0])} 個の数で最大差 {gap:.0e}")
    comparison[name] = {
        label: f"{np.linalg.norm(x):.12f}"
        for label, x in zip(("NumPy", "torch", "TRL"), three, strict=True)
    } | {"最大差": f"{gap:.0e}"}

# %%
def rows_of(table, mask):
    return [row[m].double().numpy() for row, m in zip(table, mask,
                                                      strict=True)]

# %%
if with_trl("報酬、GAE、白色化の照合"):
    sampled = [theirs.logps.double(), theirs.ref_logps]
    none = torch.zeros_like(theirs.scores)  # 点数を除いた KL の部分
    as_rows = [rows_of(x, theirs.mask) for x in sampled]
    compare("報酬 (4.10) の KL の部分",
            kl_penalized_rewards_numpy(none.tolist(), *as_rows, 0.05),
            [kl_penalized_rewards(none, *sampled, theirs.mask,
                                  0.05)[theirs.mask]],
            [theirs.kl_rewards[theirs.mask]])

# %%
if HAS_PPO:
    wide = theirs.value_mask
    A_theirs = theirs.returns - theirs.values
    A_torch, _ = gae(theirs.rewards, theirs.values, wide)
    A_np = gae_numpy(rows_of(theirs.rewards, wide),
                     rows_of(theirs.values, wide), 1.0, 0.95)
    compare("GAE", A_np, [A_torch[wide]], [A_theirs[wide]])
    narrow = torch.where(theirs.mask, A_torch, 0.0)
    compare("白色化", whiten_numpy(rows_of(A_theirs, theirs.mask)),
            [whiten(narrow, theirs.mask)[theirs.mask]],
            [theirs.advantages[theirs.mask]])

# %% [markdown]
# 次は損失と勾配です。1 回目の更新では、方策はまだ生成時と同じで、比は 1 です。2 回目では、比が 1 から離れて、クリッピングが働きます。

# %%
def losses_of(update, change=lambda x: x):
    """TRL が損失に入れた値から、方策と価値の損失を計算する。"""
    logps, values = change(update.logps), change(update.values)
    return (
        ppo_policy_loss(logps, update.old_logps.double(), update.advantages,
                        update.mask, EPSILON),
        ppo_value_loss(values, update.old_values, update.returns,
                       update.value_mask, EPSILON),
        logps, values,
    )

# %%
def numpy_losses_of(update):
    policy = [rows_of(x, update.mask) for x in (
        update.logps, update.old_logps, update.advantages)]
    value = [rows_of(x, update.value_mask) for x in (
        update.values, update.old_values, update.returns)]
    return (policy_loss_numpy(*policy, EPSILON),
            value_loss_numpy(*value, EPSILON))

# %%
if with_trl("損失と勾配の照合"):
    for k, name in enumerate(("方策の損失 (2.29)", "価値の損失")):
        compare(name, [numpy_losses_of(u)[k] for u in theirs.updates],
                [losses_of(u)[k] for u in theirs.updates],
                [(u.policy_loss, u.value_loss)[k] for u in theirs.updates])
    gaps, clipped = [], []
    for u in theirs.updates:
        policy, value, logps_leaf, values_leaf = losses_of(
            u, lambda x: x.clone().requires_grad_())
        (policy + 0.1 * value).backward()  # TRL の vf_coef は 0.1
        gaps += [(logps_leaf.grad - u.logps_gradient).abs().max().item(),
                 (values_leaf.grad - u.values_gradient).abs().max().item()]
        clipped.append(((logps_leaf.grad == 0) & u.mask).sum().item())
    check("対数確率と価値についての勾配が一致", max(gaps) <= 1e-12,
          f"最大差 {max(gaps):.0e}")
    check("クリッピングは 1 回目では働かず、2 回目で働く",
          clipped[0] == 0 < clipped[1], f"{clipped[1]} トークン")

# %%
pd.DataFrame(comparison).T if comparison else "SKIPPED: 照合の表"

# %% [markdown]
# 表の数は、比べた値の 2 乗和の平方根です（損失は 2 回分）。どれも丸め誤差の範囲で一致しました。
#
# ### サポートページのコードを CPU で動かす
#
# サポートページの `PPOTrainer` の例を、ノート PC の CPU で動かします。

# %%
import tempfile

from datasets import Dataset

prompt_dataset = Dataset.from_list([
    {"input_ids": ids} for ids in prompts])  # 変更 1

# %%
def page_trainer(train_dataset, **models):
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    given = dict(
        model=load("prime-sums")[0],
        ref_model=load("prime-sums")[0],  # 変更 2
        reward_model=new_reward_model("prime-sums", seed=2),  # 変更 3
        value_model=new_reward_model("prime-sums", seed=3),
    ) | models
    return PPOTrainer(
        processing_class=tokenizer,
        args=PPOConfig(
            output_dir=tempfile.mkdtemp(),  # 変更 4
            kl_coef=0.05, kl_estimator="k1", cliprange=0.2,
            stop_token="eos", num_sample_generations=0,
            bf16=torch.cuda.is_available(),  # 変更 5
            use_cpu=not torch.cuda.is_available(),
            response_length=8,  # 変更 6
            logging_steps=1,
        ),
        train_dataset=train_dataset, **given,
    )


# %% [markdown]
# 学習の記録は `trainer.state.log_history` に残ります。パッケージの `train` は、進捗バーを表示しながら `trainer.train()` を呼びます。 `PPOTrainer` は更新のたびに 2 度 `gc.collect()` を呼ぶので、その前に `gc.freeze()` で、今あるオブジェクトを対象から外しておきます（そうしないと、読み込んだライブラリを毎回調べなおします）。

# %%
import gc

from companion.training import train


# %%
def run_ppo(trainer):
    """PPOTrainer を走らせて、更新ごとの記録を表にする。"""
    np.random.seed(0)  # TRL は NumPy の乱数で行を混ぜる
    gc.collect()
    gc.freeze()
    try:
        with redirect_stdout(StringIO()):
            train(trainer)
    finally:
        gc.unfreeze()
    return pd.DataFrame(trainer.state.log_history)

# %%
page_history = "SKIPPED: サポートページのコード"
if with_trl("サポートページのコード"):
    page_history = run_ppo(page_trainer(prompt_dataset))[[
        "step", "objective/kl", "objective/scores", "loss/policy_avg",
        "loss/value_avg"]].round(4)
page_history

# %% [markdown]
# 1. **データは、トークン番号の列 `input_ids` だけにします。** `PPOTrainer` はトークナイザを通してくれません。文字列の列があると、下のエラーになります。また、1 バッチ（ `per_device_train_batch_size` の既定値 8）に足りない数のプロンプトを渡すと、エラーも出さずに **永久に終わりません**。
# 2. **参照方策は、方策とは別の物を渡します。** 同じ物を渡すと、下のエラーになります。 `None` なら、TRL が写しを作ります。
# 3. **報酬モデルと価値モデルは、出力が 1 つの系列分類モデルです。** 4.4.2 節のように学習した報酬モデルを渡し、価値モデルは、その写しから始めるのが普通です（ここでは乱数の線形層です）。
# 4. **出力先は、一時フォルダにします。**
# 5. **`bf16` と、どこで動かすかを明示します。** 何も書かないと TRL は bf16 を使おうとし、CUDA のない多くのマシンではエラーになります。
# 6. **回答の長さを短くします。** 既定値は 53 トークンで、この課題には長すぎます。
#
# もう一つ、サポートページの例に **書かれていない** 設定に、温度があります。既定値は 0.7 です。次の「式と TRL の違い」で見ます。

# %%
if with_trl("エラーの例"):
    texts = Dataset.from_list([{"prompt": x} for x in questions])
    text_error = error_of(lambda: run_ppo(page_trainer(texts)))
    check("文字列の列", "Error" in text_error, text_error)
    same = load("prime-sums")[0]
    same_error = error_of(lambda: page_trainer(
        prompt_dataset, model=same, ref_model=same))
    check("同じ物を渡す", "cannot be the same" in same_error, same_error)
    seven = page_trainer(prompt_dataset.select(range(7)))
    check("7 プロンプトでは、バッチが一つもできない",
          len(seven.dataloader) == 0)

# %% [markdown]
# ### 式と TRL の違い
#
# 一つずつ、数で確かめましょう。
#
# **点数は、EOS の一つ後ろに置かれます。** 式 (4.10) では、点数は最後のトークン（EOS）に足されます。TRL では、その次の場所に足し、そこでの価値 $V(s_{T+1})$ も使います。上限いっぱいの長さの回答（打ち切られたものも、最後の 1 トークンで EOS を書いたものも）では、次の場所がないので、最後のトークンに足します。
# 次の場所があるとき、GAE を後ろからたどると、EOS のアドバンテージの差は $(1-\lambda)\bigl(V(s_{T+1})-r_\phi\bigr)$ です（ $\gamma=1$、白色化の前）。 $\lambda=1$ なら差はありません。

# %%
differences = {}


def note(name, text):
    differences[name] = text
    return text

# %%
if with_trl("点数の場所"):
    by_equation = kl_penalized_rewards(
        theirs.scores, theirs.logps.double(), theirs.ref_logps, theirs.mask,
        0.05)
    A_ours, _ = gae(by_equation, theirs.values, theirs.mask)
    length = theirs.mask.sum(-1)
    ended = (length < 4).nonzero().squeeze(-1)
    eos, after = (ended, length[ended] - 1), (ended, length[ended])
    gap = A_theirs[eos] - A_ours[eos]
    claim("EOS での差 = (1 − λ)(V(s_{T+1}) − r)", gap,
          0.05 * (theirs.values[after] - theirs.scores[ended]))
    check("差は 0 でない", gap.abs().min() > 1e-3, note(
        "点数の場所", f"EOS の Â {A_ours[eos][0]:.4f} が "
        f"{A_theirs[eos][0]:.4f} に"))

# %% [markdown]
# 手計算の例でも見ておきます。EOS での価値が .7、点数が 1、 $\lambda=.95$ とします。式のとおりなら EOS の $\widehat A$ は $1-.7=.3$ です。点数を次の場所に置き、そこでの価値も .7 なら、 $0.95\times(1-.7)=.285$ です。

# %%
late, _ = gae(double([[0.0, 1.0]]), double([[0.7, 0.7]]),
              torch.ones(1, 2))
claim("点数が一つ後ろのときの、EOS の Â", late[0, 0], 0.285)

# %% [markdown]
# **温度が、確率そのものに入ります。** TRL は、生成、方策、参照方策のロジットをすべて `temperature` （既定値 0.7）で割ります。ですから、KL も、行き先の $\pi^*$ も、温度 0.7 の方策についてのものになります。学習した方策を温度 1 で使うなら、 `temperature=1.0` にします。
# 1 トークンだけ書かせて、TRL の対数確率が温度 0.7 のものであることを確かめます（TRL は 0 で割らないように 1e-7 を足しています）。

# %%
def first_logps(lm, temperature):
    """8 つのプロンプトの、1 トークン目の対数確率 (8, 語彙)。"""
    with torch.no_grad():
        logits = lm(torch.tensor(prompts)).logits[:, -1]
    return (logits / temperature).log_softmax(-1)

# %%
if with_trl("温度"):
    cool = ask_trl(prompts[:1] * 8, temperature=0.7, response_length=1)
    ours, of_ref = (first_logps(lm, 0.7 + 1e-7)[0]
                    for lm in (model, ref_model))
    # 値から、書いたトークンを探す
    token = (ours - cool.logps).abs().argmin(-1)
    claim("方策の log π", cool.logps[:, 0], ours[token], tol=1e-5)
    claim("参照方策の log π", cool.ref_logps[:, 0], of_ref[token],
          tol=1e-12)

# %%
def first_kl(temperature):
    p, q = (first_logps(lm, temperature) for lm in (model, ref_model))
    return (p.exp() * (p - q)).sum(-1).mean().item()


check("温度で KL が変わる", abs(first_kl(0.7) / first_kl(1.0) - 1) > 0.05,
      note("温度 0.7", f"1 トークン目の KL {first_kl(1.0):.4f} が "
           f"{first_kl(0.7):.4f} に"))

# %% [markdown]
# （方策の対数確率だけ許容差が大きいのは、生成のときに計算した値で、モデルが float64 でも float32 だからです。）
#
# **アドバンテージは、いつも白色化されます。** 式にはない操作で、止める設定もありません。全トークンから同じ **定数** を引いても、トークンについて和をとった勾配の期待値は変わりません（2.3.5.2 節のベースライン）。定数で割れば、勾配の大きさが変わるだけです。白色化すると、点数と $\beta$ と価値を全部 10 倍しても、方策の勾配は変わらなくなります。
# 下では、世界の全回答を 1 つずつ並べて計算した平均と標準偏差を使い、このことを確かめます。TRL では、平均と標準偏差を、引いた回答そのものから計算し、損失もトークン平均なので、勾配の向きが変わらないというのは、回答が多いときの近似です。

# %%
def whitened_slope(scale):
    tokens_rewards = scale * token_rewards_of(tokens)
    values = torch.where(world.mask, scale * any_V[:, world.prefixes], 0.0)
    rows = [t.flatten(0, -2) for t in (
        tokens_rewards, values, world.mask.expand(tokens.shape))]
    A = whiten(gae(*rows)[0], rows[2]).view(tokens.shape)
    return slope(expect(logps.exp().detach(), (A * tokens).sum(-1)).mean(),
                 theta)

# %%
along = torch.cosine_similarity(
    whitened_slope(1.0).flatten(), gae_slope(any_V, 0.95).flatten(), 0)
claim("世界で: 白色化しても勾配の向きは同じ", along, 1.0)
claim("点数、β、V を 10 倍しても同じ勾配", whitened_slope(10.0),
      whitened_slope(1.0), tol=1e-6)

# %%
if with_trl("白色化"):
    spread_of = A_theirs[theirs.mask].std().item()
    check("TRL でも標準偏差が 1 になる",
          abs(theirs.advantages[theirs.mask].std() - 1) < 1e-6, note(
              "白色化", f"Â の標準偏差 {spread_of:.3f} が 1 に"))

# %% [markdown]
# **パディングと EOS が同じだと、EOS が損失から消えます。** TRL は、回答の終わりを「最初のパディングの手前」として **値** で探します。パディングが EOS と同じ番号だと、EOS 自身がパディングとみなされ、方策の損失から外れます。報酬モデルも、EOS の一つ手前で点数を読みます。パッケージの関数は、渡されたマスクを使うだけなので、マスクを位置から作れば影響を受けません。

# %%
if with_trl("パディング = EOS"):
    _, same_id = load("prime-sums")
    same_id.pad_token = same_id.eos_token
    lost = ask_trl(tokenizer=same_id)
    lost_eos = (theirs.mask.sum(-1) - lost.mask.sum(-1)).tolist()
    check("EOS のある回答で 1 トークンずつ消える", max(lost_eos) == 1, note(
        "パディング = EOS", f"{theirs.mask.sum()} トークンが "
        f"{lost.mask.sum()} に"))
    moved = (lost.scores - theirs.scores).abs()
    check("点数も変わる", moved.max() > 0.1,
          f"最大 {moved.max():.2f}")

# %% [markdown]
# **勾配蓄積は、「平均の平均」です。** 8 つの回答を 2 つずつの 4 回に分けると、TRL は、それぞれのトークン平均をさらに平均します。トークンの数が違えば、全トークンの平均とは違う値になります。学習率を 0 にして比べます。

# %%
if with_trl("勾配蓄積"):
    parts = ask_trl(per_device_train_batch_size=2, learning_rate=0.0,
                    gradient_accumulation_steps=4).updates[:4]
    losses = torch.stack([u.policy_loss for u in parts])
    sizes = torch.stack([u.mask.sum() for u in parts])
    token_mean = (sizes * losses).sum() / sizes.sum()
    check("白色化したので、全トークンの平均は 0", abs(token_mean) < 1e-6)
    check("平均の平均は 0 でない", abs(losses.mean()) > 1e-3, note(
        "勾配蓄積", f"方策の損失 {abs(token_mean):.4f} が "
        f"{losses.mean():.4f} に（{sizes.tolist()} トークン）"))

# %% [markdown]
# **価値の損失** は $\frac12\max(\cdot)$ の平均で、 `vf_coef` （既定値 0.1）を掛けて方策の損失に足します。クリッピングの幅 `cliprange_value` （既定値 0.2）は、比ではなく **価値の単位** です。また、価値のマスクは、点数が置かれる「一つ後ろ」まで含みます。

# %%
if with_trl("価値のマスク"):
    both = theirs.mask.sum().item(), theirs.value_mask.sum().item()
    check("価値のほうが多い", both[1] > both[0], note(
        "価値の損失", f"方策は {both[0]} トークン、価値は {both[1]} 個所"))

# %% [markdown]
# **既定値** も見ておきます。

# %%
if with_trl("既定値"):
    from trl.experimental.ppo import PPOConfig

    defaults = PPOConfig(tempfile.mkdtemp(), use_cpu=True, bf16=False)
    for name in ("learning_rate", "num_ppo_epochs", "num_mini_batches",
                 "temperature", "response_length", "kl_coef", "cliprange",
                 "cliprange_value", "vf_coef", "gamma", "lam",
                 "whiten_rewards", "missing_eos_penalty"):
        note(f"既定値 {name}", str(getattr(defaults, name)))
pd.DataFrame(differences.items(), columns=["式と TRL の違い", "測った値"])

# %% [markdown]
# ## 学習
#
# 小さな言語モデルを、RLHF の 2 段で学習させます。課題は、4.4.2 節と同じ、6 桁の数字の並べ替え（`780667>` → `066778`）です。
# まず、報酬モデルを学習します。4.4.2 節と同じ関数、同じ選好データです。真の報酬（合っている桁の数、全部合っていれば +2、6 桁の数字でなければ 0）は、報酬モデルにも方策にも見せません。

# %%
from companion.tasks import SORTING, preferences
from companion.training import preset, train_reward_model

pairs = preferences(SORTING, preset("reward_model").examples, seed=0)
sorting_rm, rm_history = train_reward_model("sorting", pairs)
ends = rm_history["accuracy"].iloc[[0, -1]]
print(f"選好データでの正解率 {ends.iloc[0]:.2f} → {ends.iloc[1]:.2f}")

# %%
from dataclasses import asdict

ppo_preset = preset("ppo")
sft, tokenizer = load("sorting", ppo_preset.size)

# %%
train_prompts = SORTING.train_prompts[:ppo_preset.examples]
prompt_dataset = Dataset.from_list([
    {"input_ids": ids} for ids in tokenizer(list(train_prompts))["input_ids"]
])
pd.DataFrame([asdict(ppo_preset)]).drop(columns="group_size")

# %% [markdown]
# 学習中は、TRL が記録する値のほかに、学習に出てこない 250 問に温度 1 で答えさせて、点数、真の報酬、正解率、6 桁の数字になっていない回答の割合を、4 回の更新ごとに測ります。真の報酬を知っているのは、測る側だけです。

# %%
from transformers import TrainerCallback

from companion.lm import generate, score

HELD_OUT = list(SORTING.test_prompts[:250])


def sample_answers(policy):
    return generate(policy, tokenizer, HELD_OUT, temperature=1.0,
                    max_new_tokens=SORTING.max_new_tokens, seed=1)

# %%
def evaluate(answers):
    both = list(zip(HELD_OUT, answers, strict=True))
    return {
        "点数": score(sorting_rm, tokenizer, HELD_OUT, answers).mean().item(),
        "真の報酬": np.mean([SORTING.reward(x, y) for x, y in both]),
        "正解率": np.mean([SORTING.answer(x) == y for x, y in both]),
        "崩れた割合": np.mean([not (len(y) == 6 and y.isdecimal()
                              and y.isascii()) for y in answers]),
    }

# %%
class Watch(TrainerCallback):
    """学習に出てこない問題での成績を、4 回の更新ごとに測る。"""

    def __init__(self, policy):
        self.policy, self.rows = policy, []

    def measure(self, step):
        found = evaluate(sample_answers(self.policy))
        self.rows.append({"step": step} | found)

    def on_train_begin(self, args, state, control, **kwargs):
        self.measure(0)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 4 == 0:
            self.measure(state.global_step)


# %% [markdown]
# サポートページの切り替え（ `kl_estimator="k1"`, `cliprange=0.2`, `stop_token="eos"` ）を使い、大きさと学習率はプリセットに合わせます。違うのは、温度を 1 にすること、回答の上限を 8 トークンにすること、1 つの回答で 2 エポック更新すること、それに $\beta$ です。ステップ 1 で見たとおり、 $\beta$ は点数の目盛りで決まります。サポートページの 0.05 は、実験 4 で試します。

# %%
SAMPLING = dict(temperature=1.0, response_length=SORTING.max_new_tokens,
                stop_token="eos")

# %%
def train_policy(beta):
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    policy, _ = load("sorting", ppo_preset.size)
    watch = Watch(policy)
    trainer = PPOTrainer(
        model=policy, ref_model=copy.deepcopy(sft),
        reward_model=sorting_rm, value_model=copy.deepcopy(sorting_rm),
        processing_class=tokenizer, train_dataset=prompt_dataset,
        args=PPOConfig(
            kl_coef=beta, kl_estimator="k1", cliprange=0.2,
            num_sample_generations=0, num_ppo_epochs=2,
            total_episodes=ppo_preset.steps * ppo_preset.batch_size,
            **SAMPLING, **ppo_preset.arguments(),
        ),
        callbacks=[watch],
    )
    history = run_ppo(trainer)
    return policy, history, pd.DataFrame(watch.rows)

# %%
runs = {}
if with_trl("言語モデルの PPO"):
    print("生成の設定:", SAMPLING | dict(top_k=0, top_p=1.0))
    runs[ppo_preset.beta] = train_policy(ppo_preset.beta)

# %% [markdown]
# はじめの 6 枚は TRL の記録、次の 3 枚は学習に出てこない 250 問で測ったものです。学習率は、最後に 0 になるように下げています。

# %%
from companion.plots import curves

if with_trl("学習の曲線"):
    policy, history, held_out = runs[ppo_preset.beta]
    ended = history["val/num_eos_tokens"] / ppo_preset.batch_size
    history["truncated"] = 1 - ended
    drawn = curves(history, {
        "参照方策との KL（nat）": "objective/kl",
        "回答のエントロピー（nat）": "objective/entropy",
        "打ち切られた割合": "truncated",
        "クリップされた割合": "policy/clipfrac_avg",
        "log 比の 2 乗の半分（approx KL）": "policy/approxkl_avg",
        "価値の損失": "loss/value_avg",
    })
drawn if HAS_PPO else None

# %%
if HAS_PPO:
    drawn = curves(held_out, {name: name for name in (
        "点数", "真の報酬", "正解率")}, x="step")
drawn if HAS_PPO else None

# %%
if with_trl("学習の確認"):
    check("1 回目の更新の前、参照方策との KL は 0",
          abs(history["objective/kl"][0]) < 1e-4,
          f"{history['objective/kl'][0]:.0e}")
    before, after = held_out.iloc[0], held_out.iloc[-1]
    check("点数が上がる", after["点数"] > before["点数"] + 0.2,
          f"{before['点数']:.2f} → {after['点数']:.2f}")
    check("真の報酬も、正解率も上がる",
          after["真の報酬"] > before["真の報酬"] + 0.5
          and after["正解率"] > before["正解率"] + 0.15,
          f"正解率 {before['正解率']:.2f} → {after['正解率']:.2f}")

# %%
if with_trl("学習の前後の回答"):
    drawn = pd.DataFrame({
        "プロンプト": HELD_OUT[:6],
        "正解": [SORTING.answer(x) for x in HELD_OUT[:6]],
        "学習前": sample_answers(sft)[:6],
        "学習後": sample_answers(policy)[:6],
    })
drawn if HAS_PPO else None

# %%
from companion.lm import measure

if with_trl("学習の前後の正解率"):
    greedy = {name: measure(lm, tokenizer, SORTING, HELD_OUT)
              for name, lm in (("学習前", sft), ("学習後", policy))}
    drawn = pd.DataFrame(greedy).T.rename(columns={
        "greedy": "確率最大のトークンを選ぶ", "sampled": "温度 1 で引く"})
    start = greedy["学習前"]
    check("学習前: 確率最大なら 9 割以上、温度 1 で引くと 4 割前後",
          start["greedy"] > 0.9 and abs(start["sampled"] - 0.4) < 0.05)
drawn if HAS_PPO else None

# %% [markdown]
# 学習前のモデルは、4 割が正解、残りがもっともらしい間違い、という手本で学んだものです。確率最大のトークンを選んでいけばほとんど正解できるのに、温度 1 で引くと 4 割しか正解を書きません。PPO は、知っていることを、もっと確実に書かせるようにしています。
# `PPOTrainer` は、勾配の大きさを記録しません。また、点数の平均は、報酬モデルの原点が決まっていないので（4.4.2 節）、負でも構いません。

# %% [markdown]
# ## 実験
#
# 実験 1〜3 は、もう一度、数え上げられる世界で行います。文字は 3 つ、回答は最長 2 トークン（13 通り）、プロンプトは 2 つです。8 つの乱数の種（シード）を一度に計算します。図の線は 8 シードの中央値、帯は最小値から最大値までです。
#
# ### 実験 1：PPO は π* に着くか
#
# `tabular_ppo` は、表形式の方策と価値の PPO です。プロンプトごとに回答を 64 個ずつ引き、式 (4.10)、GAE（ $\lambda=1$ ）、白色化、(2.29) と価値の損失で 2 回更新する、という TRL と同じ手順を 200 回繰り返します。使っているのは、上で TRL と照合した関数です。参照方策から出発します。

# %%
from companion.training import tabular_ppo

code = inspect.getsource(tabular_ppo)
print(code[code.index("    for _ in range(updates)"):])

# %%
small = World(prompts=2, letters=3, max_length=2)
g = torch.Generator().manual_seed(0)
ref_8, scores_8 = small.random_logits(g, 8), small.random_rewards(g, 8)
ref_logps_8 = small.log_probs(ref_8)

# %%
def ppo(beta, *tables, updates=200, world=small):
    own = torch.Generator().manual_seed(1)
    return tabular_ppo(world, *tables, beta, generator=own, updates=updates)


distance = {}
for b in (0.5, 1.0, 0.2):
    trace = ppo(b, ref_8, scores_8)
    distance[f"β = {b}"] = kl(
        trace, tilt(ref_logps_8, scores_8 / b)).mean(-1).T

# %%
from companion.plots import spread

spread(range(201), distance, yscale="log", xlabel="更新回数",
       ylabel="KL(π‖π*)（nat）", title="PPO は π* に着く（8 つの世界）")

# %%
for name, far in distance.items():
    check(f"{name}: 8 シードすべてで π* のすぐ近くに着く",
          far[:, -1].max() < 0.02 and far[:, 0].min() > 0.1,
          f"{far[:, 0].min():.2f}〜{far[:, 0].max():.2f} → 最大 "
          f"{far[:, -1].max():.0e}")
begin, later = ([distance[f"β = {b}"][:, k].quantile(0.5)
                 for b in (0.2, 0.5, 1.0)] for k in (0, 50))
check("β が小さいほど π* は遠く、50 回の更新の後もまだ遠い",
      begin[0] > 2 * begin[1] > 4 * begin[2]
      and later[0] > 2 * later[1] > 4 * later[2])

# %% [markdown]
# 引いた回答だけから学ぶので、更新のたびに誤差が入ります。それでも、方策は $\pi^*$ に着きます。 $\beta$ が小さいほど $\pi^*$ は遠く、時間がかかります。
#
# **着かないこともあります。** 回答を 3 トークン（40 通り）に延ばし、 $\beta=0.2$ とすると、8 つの世界のうち 1 つが取り残されます。

# %%
longer = World(prompts=2, letters=3, max_length=3)
g = torch.Generator().manual_seed(0)
long_ref = longer.random_logits(g, 8)
long_scores = longer.random_rewards(g, 8)
long_ref_logps = longer.log_probs(long_ref)

# %%
long_star = tilt(long_ref_logps, long_scores / 0.2)
trace = ppo(0.2, long_ref, long_scores, world=longer)
left = kl(trace[-1], long_star)  # (シード, プロンプト)
check("15 組は着き、1 組だけ取り残される",
      (left > 1.0).sum() == 1 and (left < 0.1).sum() == 15,
      f"KL {left.max():.2f}、ほかは最大 {left[left < 1].max():.3f}")

# %%
seed, prompt = divmod(left.argmax().item(), 2)

# %%
star, ref = long_star[seed, prompt], long_ref_logps[seed, prompt]
last = trace[:, seed, prompt]
goal, stuck = star.argmax(), last[-1].argmax()
pd.DataFrame({
    longer.responses[y]: {
        "点数": long_scores[seed, prompt, y].item(),
        "π*": star[y].exp().item(), "参照方策": ref[y].exp().item(),
        "60 回更新した方策": last[60, y].exp().item(),
        "200 回更新した方策": last[-1, y].exp().item(),
    } for y in (goal, stuck)
}).T.round(5)

# %%
check("π* がいちばん出す回答を、参照方策はほとんど出さない",
      star[goal].exp() > 0.5 and ref[goal].exp() < 0.01)
check("学習の途中で、その確率はさらに下がった",
      last[60, goal] < ref[goal] - 1 and last[-1, goal].exp() < 1e-3)

# %% [markdown]
# $\pi^*$ がいちばんよく出す回答を、参照方策は 1 % も出しません。64 個引いても、たいてい一つも入りません。その間に、同じ書き出しのほかの回答の低い点数から書き出しの確率が下がり、ますます出てこなくなったのだと考えられます。ステップ 3 の勾配は期待値として正しくても、引いた回答の中にないものは学べません。
#
# ### 実験 2：同じ KL で、どこまで点数を上げられるか
#
# ステップ 7 のフロンティアと、PPO、DPO（4.5.1 節）、best-of-n を比べます。世界を一つに決め、乱数だけを 8 通りに変えます。
# 使う回答の数は、プロンプトあたり 6,400 個にそろえます。PPO は 64 個 × 100 回で、一つ一つの **点数を見ます**。DPO は参照方策から引いた 3,200 対で、点数の Bradley–Terry モデルで引いた「どちらが好まれたか」だけを見ます。best-of-n は学習をせず、正確な分布を使います。

# %%
from companion.exact import sample_preferences
from companion.losses import dpo_loss

one_ref, one_scores = ref_8[:1], scores_8[:1]
one_ref_logps = small.log_probs(one_ref)
eight_ref = one_ref_logps.expand(8, -1, -1)

# %%
def dpo(beta, pairs, steps=200):
    theta = one_ref.expand(8, -1, -1, -1).clone().requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=0.2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        now = small.log_probs(theta)
        pair_logps = [table.gather(-1, y).flatten()
                      for table in (now, eight_ref) for y in pairs]
        optimizer.zero_grad()
        (8 * dpo_loss(*pair_logps, beta)).backward()  # シードごとの平均の和
        optimizer.step()
        cosine.step()
    return small.log_probs(theta.detach())

# %%
BETAS = (0.3, 0.5, 1.0, 2.0)
g = torch.Generator().manual_seed(2)
pairs = sample_preferences(eight_ref.exp(), one_scores, 3_200, g)
many = one_ref.expand(8, -1, -1, -1), one_scores.expand(8, -1, -1)

# %%
trained = {
    "PPO": {b: ppo(b, *many, updates=100)[-1] for b in BETAS},
    "DPO": {b: dpo(b, pairs) for b in BETAS},
}

# %%
def on_plane(logps):
    return kl_and_reward(logps, one_ref_logps, one_scores)

# %%
line = on_plane(tilt(one_ref_logps, one_scores / torch.logspace(
    -0.8, 2, 80).double()[:, None, None]))
numbers = (1, 2, 3, 4, 6, 8, 16)
tops = torch.stack([best_of(n, one_ref_logps[0], one_scores[0])
                    for n in numbers])

# %%
lacks = {
    name: {b: b * kl(of_beta[b], tilt(one_ref_logps, one_scores / b)).mean(-1)
           for b in BETAS} for name, of_beta in trained.items()
}

# %%
drawn, (axes,) = figure(1, 2, panel=(4.4, 3.5))
axes[0].plot(*line, color=GREY, label="フロンティア（π*）")
for name, colour, mark in (("PPO", COLOURS[0], "o"),
                           ("DPO", COLOURS[1], "^")):
    style = dict(color=colour, marker=mark, linestyle="", alpha=0.6)
    for k, b in enumerate(BETAS):
        axes[0].plot(*on_plane(trained[name][b]), **style,
                     label=name if k == 0 else None)
        axes[1].plot([k] * 8, lacks[name][b], **style)
axes[0].plot(*on_plane(tops), "s", color=COLOURS[2], label="best-of-n")
axes[0].set(xlabel="参照方策との KL（nat）", ylabel="点数の期待値",
            title="KL と点数（8 シード）")
axes[0].legend(loc="lower right")
axes[1].set_xticks(range(4), BETAS)
axes[1].set(yscale="log", xlabel="β", title="J の不足分 β KL(π‖π*)")
drawn

# %% [markdown]
# 左の図では、PPO の丸は、8 シードが重なってフロンティアの上に乗っています。DPO の三角は、線のすぐ下に散らばります（どちらも、右から $\beta=0.3,0.5,1,2$ です）。四角は、左から $n=1,2,3,4,6,8,16$ の best-of-n です。
# どれも線に近いので、右の図に、同じ $\beta$ の $\pi^*$ からの $J$ の不足分 $\beta D_{\mathrm{KL}}[\pi\|\pi^*]$ （ステップ 1）を、対数の目盛りで描きました。

# %%
for b in BETAS:
    of_ppo, of_dpo = (lacks[name][b].quantile(0.5) for name in trained)
    detail = f"PPO {of_ppo:.5f}、DPO {of_dpo:.5f}"
    if b < 0.5:
        check(f"β = {b}: どちらも不足分は小さい",
              max(of_ppo, of_dpo) < 0.003, detail)
    else:
        check(f"β = {b}: 不足分の中央値は、PPO のほうがずっと小さい",
              of_ppo < of_dpo / 4, detail)

# %% [markdown]
# DPO の不足分は、損失を下げきれていないためでしょうか、それとも、引いた対の数が足りないためでしょうか。対を 1/4（800 対）に減らして、比べます。

# %%
for b in BETAS:
    fewer = dpo(b, [y[..., :800] for y in pairs])
    lack = b * kl(fewer, tilt(one_ref_logps, one_scores / b)).mean(-1)
    more = lack.quantile(0.5) / lacks["DPO"][b].quantile(0.5)
    check(f"β = {b}: 対を 1/4 にすると、DPO の不足分は 3 倍以上", more > 3,
          f"{more:.1f} 倍")

# %%
target = tilt(one_ref_logps, one_scores / 0.3)
long_lack = 0.3 * kl(dpo(0.3, pairs, steps=400), target).mean(-1)
check("β = 0.3: 2 倍長く学習しても、DPO の不足分はほとんど同じ",
      abs(long_lack / lacks["DPO"][0.3] - 1).max() < 0.1)
long_lack = 0.3 * kl(ppo(0.3, *many)[-1], target).mean(-1)
before, after = (x.quantile(0.5) for x in (lacks["PPO"][0.3], long_lack))
check("β = 0.3: 更新も回答も 2 倍にすると、PPO は近づく",
      after < before * 0.75,
      f"{before:.5f} → {after:.5f}")

# %% [markdown]
# best-of-n には $\beta$ がないので、同じ KL でのフロンティアの高さと比べます。

# %%
grid = torch.logspace(-1.5, 4, 4_000).double()
grid_Z = log_partition(
    one_ref_logps, one_scores / grid[:, None, None]).mean(-1)

# %%
def frontier(spent):
    """KL spent (n,) でのフロンティアの高さ。"""
    return (grid[:, None] * (grid_Z[:, None] + spent)).min(0).values

# %%
spent, gained = on_plane(tops)
behind = frontier(spent) - gained
for n, amount in zip(numbers, behind, strict=True):
    print(f"n = {n:2d}: フロンティアより {amount:.4f} 低い")
check("best-of-n は、フロンティアより少し低い", behind[1:].min() > 1e-4
      and behind.max() < 0.06)

# %% [markdown]
# 不足分の理由は違います。DPO は損失を下げきっていて、残った不足分は、雑音の入った勝ち負けを 3,200 対しか見ていないことによります。PPO は点数をじかに見るので、 $\beta\ge0.5$ ではずっと近くまで着きます。 $\beta=0.3$ では $\pi^*$ が遠く、100 回ではまだ途中です。
# 報酬モデルの誤りまで含めた比較ではないことに注意してください（点数を真の報酬とみなしています）。
# best-of-n は、学習なしでフロンティアのすぐ下に来ます。ただし、使うたびに $n$ 個の回答を書かなければなりません。
#
# ### 実験 3：報酬の中の k1、k2、k3
#
# ステップ 3 の続きです。KL の推定量を報酬に入れ（データとして扱い）、期待値の勾配を **正確に** 計算して上ります。サンプルの誤差がないので、行き先の違いは推定量の違いです。

# %%
ref_tokens_8 = small.token_log_probs(ref_8)

# %%
def climb(name, beta=0.5, steps=300):
    """報酬に推定量 name を入れた、正確な勾配での学習。"""
    theta = ref_8.clone().requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=0.1)
    trace = []
    for _ in range(steps):
        tokens = small.token_log_probs(theta)
        d = ref_tokens_8 - tokens.detach()
        k = {"k1": -d, "k2": d**2 / 2, "k3": torch.expm1(d) - d}[name]
        probs = tokens.sum(-1).exp()
        objective = expect(probs, scores_8 - beta * k.sum(-1)).sum()
        optimizer.zero_grad()
        (-objective).backward()
        optimizer.step()
        trace.append(tokens.sum(-1).detach())
    return torch.stack(trace)

# %%
star_8 = tilt(ref_logps_8, scores_8 / 0.5)
climbs = {name: climb(name) for name in ("k1", "k2", "k3")}

# %%
drawn, (axes,) = figure(1, 2, panel=(4.3, 3.2))
spread(range(300),
       {name: kl(t, star_8).mean(-1).T for name, t in climbs.items()},
       ax=axes[0], yscale="log", xlabel="更新回数",
       title="KL(π‖π*)（nat）")
spread(range(300),
       {name: t.amin((-2, -1)).T / np.log(10) for name, t in climbs.items()},
       ax=axes[1], xlabel="更新回数",
       title="いちばん出にくい回答の log₁₀ π")
drawn

# %%
for name, found in climbs.items():
    far = kl(found[-1], star_8).mean(-1)
    rare = found[-1].amin((-2, -1)) / np.log(10)
    detail = (f"KL {far.min():.4f}〜{far.max():.4f}、log₁₀ π の最小 "
              f"{rare.min():.0f}")
    if name == "k1":
        check("k1: 8 シードすべてで π* に着く", far.max() < 1e-3, detail)
    else:
        check(f"{name}: 8 シードすべてで π* に着かない", far.min() > 0.1,
              detail)

# %%
fallen = (climbs["k3"][-1].amin((-2, -1))
          - climbs["k3"][150].amin((-2, -1))) / np.log(10)
check("k3: いちばん出にくい回答の確率は、後半の 150 回でも 8 桁以上下がる",
      fallen.max() < -8, f"{fallen.min():.0f}〜{fallen.max():.0f} 桁")
rare = {name: (found[-1] - star_8).amin((-2, -1)) / np.log(10)
        for name, found in climbs.items()}
check("k2、k3: π* より 1 桁以上低い回答がある",
      max(rare[name].max() for name in ("k2", "k3")) < -1)

# %% [markdown]
# $k_2$ と $k_3$ では $\pi^*$ に着かないだけでなく、出にくい回答の確率が、 $\pi^*$ よりもずっと低くなります。とくに $k_3$ では、300 回たっても下がりつづけています。ステップ 3 の図のとおり、出しにくくなったトークンにも罰が付き、さらに出しにくくなるのだと考えられます。
# サポートページの `kl_estimator="k1"` （TRL の既定値でもあります）は、大事な指定です。
#
# ### 実験 4：β を 0 に近づけると
#
# 言語モデルに戻ります。 $\beta$ を、プリセットの値から、サポートページの 0.05、そして 0 へと下げます。ほかは「学習」と同じです。方策が上げるのは報酬モデルの点数で、本当に上げたいのは真の報酬です。

# %%
if with_trl("β を変えた学習"):
    for b in (0.05, 0.0):
        runs[b] = train_policy(b)
    drawn, axes = figure(2, 2, panel=(4.2, 2.6))
    tints = {ppo_preset.beta: COLOURS[0], 0.05: COLOURS[3], 0.0: COLOURS[4]}
    for ax, name in zip(axes.flat, ("点数", "真の報酬", "正解率",
                                    "崩れた割合"), strict=True):
        for b, (_, _, table) in runs.items():
            ax.plot(table["step"], table[name], color=tints[b],
                    label=f"β = {b:g}")
        ax.set(title=name, xlabel="更新回数")
    axes[0, 0].legend(loc="lower right")
drawn if HAS_PPO else None

# %%
if with_trl("過剰最適化の確認"):
    last = pd.DataFrame({b: table.iloc[-1]
                         for b, (*_, table) in runs.items()})
    point, true, right = (last.loc[name] for name in (
        "点数", "真の報酬", "正解率"))
    good, page, none = ppo_preset.beta, 0.05, 0.0
    check("点数は、β が小さいほど高い",
          point[none] > point[page] + 0.02 > point[good] + 0.05,
          "、".join(f"β = {b:g}: {v:.2f}" for b, v in point.items()))
    check("真の報酬は、β が小さいほど低い",
          true[none] + 0.3 < true[page] < true[good] - 0.1,
          "、".join(f"β = {b:g}: {v:.2f}" for b, v in true.items()))

# %%
if HAS_PPO:
    course = runs[none][2]
    check("β = 0 の真の報酬は、学習前より下がる",
          true[none] < course["真の報酬"].iloc[0] - 0.3,
          f"{course['真の報酬'].iloc[0]:.2f} → {true[none]:.2f}")
    check("β = 0 の正解率は、いったん上がってから下がる",
          right[none] < course["正解率"].max() - 0.05,
          f"最大 {course['正解率'].max():.2f} → {right[none]:.2f}")
    check("最後の正解率は、プリセットの β よりずっと低い",
          right[none] < right[good] - 0.15,
          f"{right[none]:.2f} と {right[good]:.2f}")
    spent = {b: history["objective/kl"].iloc[-5:].mean()
             for b, (_, history, _) in runs.items()}
    check("β が小さいほど、参照方策から離れる",
          spent[good] < spent[page] < spent[none],
          "、".join(f"β = {b:g}: {v:.2f} nat" for b, v in spent.items()))

# %% [markdown]
# 点数だけを見ていると、 $\beta=0$ がいちばんうまくいったように見えます。ところが、真の報酬は学習前より下がっています。これが **報酬ハッキング** （過剰最適化）です。サポートページの 0.05 は、この報酬モデルの点数の目盛りでは小さめで、真の報酬は、 $\beta$ がもっと大きいときほどには上がりませんでした。
# 乱数の種を変えると下がり方は変わります（1 回ずつの学習なので、曲線の細かい形を比べないでください）。 $\beta=0$ で何を書くようになったのかを見ましょう。

# %%
if with_trl("報酬ハッキングの例"):
    hacked = sample_answers(runs[0.0][0])
    table = pd.DataFrame({
        "プロンプト": HELD_OUT, "正解": map(SORTING.answer, HELD_OUT),
        "β = 0 の回答": hacked})
    truth = list(table["正解"])
    table["回答の点数"] = score(sorting_rm, tokenizer, HELD_OUT, hacked)
    table["正解の点数"] = score(sorting_rm, tokenizer, HELD_OUT, truth)
    table["真の報酬"] = list(map(SORTING.reward, HELD_OUT, hacked))
    wrong = table[table["真の報酬"] < 8]
    fooled = (wrong["回答の点数"] > wrong["正解の点数"]).mean()
    check("間違った回答の多くに、正解より高い点数が付く", fooled > 0.4,
          f"{fooled:.0%}")
    drawn = wrong.nlargest(6, "回答の点数").round(2)
drawn if HAS_PPO else None

# %% [markdown]
# 報酬モデルが高い点数を付ける、正しくない回答です。報酬モデルは、人が比べた回答（ここでは、手本の分布から引いた 6 桁の回答）の近くでしか学んでいません。方策は、点数が上がるなら、その外へも出ていきます。KL の罰は、報酬モデルを信じてよい範囲に方策をとどめるためのものです。
# $\beta$ が大きければよいわけでもありません。大きすぎれば、方策は参照方策から動かなくなります。本当に上げたいものを少しでも測れるなら（人の評価、正解のある問題）、それを見ながら $\beta$ を決めます。

# %% [markdown]
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/4.4.3-ppo-rlhf.ipynb](exercises/4.4.3-ppo-rlhf.ipynb) で、式 (4.10) の報酬と価値の損失を自分で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **打ち切り** `World(prompts=2, letters=2, max_length=3)` で、打ち切られた回答には点数を付けない（0 とする）ことにすると、 $\pi^*$ はどう変わるでしょうか。ステップ 1 の式で予想してから、 `scores` を書き換えて確かめてください。TRL の `missing_eos_penalty` は、これと何が違うでしょうか。
# 3. **取り残された世界** 実験 1 の最後で、取り残された 1 組を救うには、何を変えればよいでしょうか。1 回に引く回答の数、学習率、更新回数（ `tabular_ppo` の引数 `samples`, `learning_rate`, `updates` ）を変えてみましょう。参照方策を変えてもよければ、どうしますか。
# 4. **β を動かす** 実験 4 で、学習の途中で $\beta$ を変えられるとしたら、どう変えますか。KL の目標を決めて $\beta$ を上げ下げする方法（適応的な KL 係数）を、 `tabular_ppo` をまねて書いてみましょう。

# %% [markdown]
# ## 参考文献
#
# - Ziegler ほか. Fine-Tuning Language Models from Human Preferences. 2019. [arXiv:1909.08593](https://arxiv.org/abs/1909.08593) KL の罰を報酬に入れる、式 (4.9)・(4.10) の形の源です。
# - Stiennon ほか. Learning to summarize from human feedback. 2020. [arXiv:2009.01325](https://arxiv.org/abs/2009.01325) 報酬モデルの過剰最適化の図があります。
# - Ouyang ほか. Training language models to follow instructions with human feedback. 2022. [arXiv:2203.02155](https://arxiv.org/abs/2203.02155) InstructGPT。
# - Schulman ほか. Proximal Policy Optimization Algorithms. 2017. [arXiv:1707.06347](https://arxiv.org/abs/1707.06347) 式 (2.29) の論文です。
# - Schulman ほか. High-Dimensional Continuous Control Using Generalized Advantage Estimation. 2015. [arXiv:1506.02438](https://arxiv.org/abs/1506.02438) GAE。
# - Korbak, Perez, Buckley. RL with KL penalties is better viewed as Bayesian inference. 2022. [arXiv:2205.11275](https://arxiv.org/abs/2205.11275) 傾けた方策 $\pi^*$ を目標とする見方です。
# - Gao, Schulman, Hilton. Scaling Laws for Reward Model Overoptimization. 2022. [arXiv:2210.10760](https://arxiv.org/abs/2210.10760) 実験 4 の現象を、大きさを変えて調べています。
# - Beirami ほか. Theoretical guarantees on the best-of-n alignment policy. 2024. [arXiv:2401.01879](https://arxiv.org/abs/2401.01879) best-of-n の KL が上限でしかないことを示します。
# - Huang ほか. The N+ Implementation Details of RLHF with PPO: A Case Study on TL;DR Summarization. 2024. [arXiv:2403.17031](https://arxiv.org/abs/2403.17031) TRL の `PPOTrainer` のもとになった実装の細部です。
# - Tang, Munos. On a few pitfalls in KL divergence gradient estimation for RL. 2025. [arXiv:2506.09477](https://arxiv.org/abs/2506.09477) ステップ 3 の、値と勾配の食い違いを扱います。
# - Schulman. [Approximating KL Divergence](http://joschu.net/blog/kl-approx.html). 2020. $k_1,\ k_2,\ k_3$ の紹介です。
# - TRL 1.12.0 `PPOTrainer`（`trl/experimental/ppo/ppo_trainer.py`）。
