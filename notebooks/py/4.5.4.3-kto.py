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
# # 4.5.4.3 KTO：「良い」「悪い」のラベルだけで学ぶ
#
# 本書 4.5.4.3 節の式 (4.29)〜(4.32) を扱います。
#
# DPO には、同じプロンプトへの 2 つの回答を比べたデータが必要でした。けれども、実際に集まりやすいのは「この回答は良かった」「これは悪かった」という、一つずつの評価です。
# KTO（Kahneman–Tversky optimization）は、この対になっていない評価から学びます。手がかりは、人は損得を絶対値ではなく **参照点** からの差で感じる、という行動経済学のプロスペクト理論です。
# このノートブックでは、損失の各部分を小さな世界で実行し、TRL の `KTOTrainer` と値・勾配が一致することを確かめ、小さな言語モデルを学習させます。
# 途中で、KTO の参照点が「KL の不偏な推定」ではないこと、KTO の行き先が $\pi^*$ ではないこと、良い評価が少ないときに重みが欠かせないことを、数で確かめます。
#
# 準備のしかたは [README](../README.md) に、実行時間の実測値は [RUNTIMES.md](../RUNTIMES.md) にあります。 `companion` は、このノートブックのための小さなパッケージです。
# `claim` は等式の両辺を計算して比べ（許容差は、断りがなければ 1e-10）、 `check` は条件を確かめます。成り立たなければ、そこでエラーになって止まります。

# %%
import torch

from companion.notebook import check, claim, setup

setup()

# %% [markdown]
# ## 記号
#
# | 記号 | 変数 | 形状 | TRL での名前 |
# |---|---|---|---|
# | $x,\ y$ （プロンプト、回答） | `prompt`, `completion` | – | `prompt`, `completion` |
# | $\mathcal{Y}^+(x),\ \mathcal{Y}^-(x)$ （望ましい回答、望ましくない回答） | `desirable` （True / False） | (B,) | `label` |
# | $\log\pi_\theta(y\mid x),\ \log\pi_{\mathrm{ref}}(y\mid x)$ | `logps`, `ref_logps` | (B,)、世界では (X, Y) | `logps/chosen`, `logps/rejected` （ラベルごとの平均） |
# | $h_\theta(x,y)=\log\frac{\pi_\theta(y\mid x)}{\pi_{\mathrm{ref}}(y\mid x)}$ （対数確率比） | `log_ratios` | (B,)、世界では (X, Y) | `rewards/chosen`, `rewards/rejected` は、この $\beta$ 倍 |
# | $z_0$ （参照点） | `reference_point` | – | `kl` |
# | $\beta$ | `beta` | – | `beta` |
# | $w_+,\ w_-$ （望ましい回答、望ましくない回答の重み） | `desirable_weight`, `undesirable_weight` | – | 同じ |
# | $q(x,y)$ （回答に「良い」というラベルが付く確率） | `q` | (X, Y) | – |
#
# B は回答の数、X はプロンプトの数、Y は数え上げた回答の数です。対数確率は、EOS を含む回答のトークンについての **和** で、単位は nat です。

# %% [markdown]
# ## 導出
#
# ### 全部を数え上げられる世界
#
# 文字は a と b の 2 つ、回答は最長 3 トークンという、とても小さな言語を用意します。回答は EOS（ `$` と書きます）で終わるか、長さの上限で打ち切られます。
# 方策は、プロンプトと接頭辞ごとに次のトークンのロジットを並べた表です（表形式の方策）。期待値はどれも有限の和になり、等式の両辺を float64 で計算して比べられます。

# %%
from companion.exact import World, expect, kl, log_partition, tilt

world = World(prompts=2, letters=2, max_length=3)
print(len(world.responses), "通りの回答:", " ".join(world.responses))

# %% [markdown]
# 参照方策 $\pi_{\mathrm{ref}}$ と真の報酬 $r(x,y)$ を乱数で決めます。目的関数 (4.9) を最大にする方策は $\pi^*\propto\pi_{\mathrm{ref}}\exp(r/\beta)$ でした（4.5.1 節のノートブック）。比べる相手として、これも作っておきます。

# %%
g = torch.Generator().manual_seed(0)
ref_logits = world.random_logits(g)
ref_logps = world.log_probs(ref_logits)  # (X, Y)
rewards = world.random_rewards(g)  # (X, Y)

beta = 0.5
star_logps = tilt(ref_logps, rewards / beta)
logps_200 = world.log_probs(world.random_logits(g, 200))  # (200, X, Y)
claim("Σ_y π*(y|x) = 1", star_logps.exp().sum(-1), torch.ones(2))

# %% [markdown]
# ### ステップ 1：参照点のまわりの価値
#
# プロスペクト理論では、人が結果 $u$ から感じる **価値** は、参照点 $u_0$ からの差で決まります。得をしている側（ $u>u_0$ ）では上に凸で、得が増えるほど一単位のうれしさは小さくなり、損をしている側では下に凸で、損が増えるほど一単位の痛みは小さくなります。
# Tversky と Kahneman が実験から求めた形は、得の側が $(u-u_0)^{0.88}$、損の側が $-2.25\,(u_0-u)^{0.88}$ でした。
#
# KTO は、 $u$ を対数確率比 $h_\theta(x,y)$、参照点を $z_0$ とし、価値の形をシグモイド関数で置き換えます（もとの形は、参照点のところで傾きが無限大になり、数値的に扱いにくいからです）。
#
# $$
# v(x,y)=\begin{cases}\sigma\bigl(\beta(h_\theta(x,y)-z_0)\bigr)&y\in\mathcal{Y}^+(x)\\ \sigma\bigl(\beta(z_0-h_\theta(x,y))\bigr)&y\in\mathcal{Y}^-(x)\end{cases}
# $$

# %%
from companion.plots import COLOURS, GREY, figure

u = torch.linspace(-10, 10, 401, dtype=torch.float64)
magnitude = u.abs() ** 0.88
prospect = torch.where(u >= 0, magnitude, -2.25 * magnitude)
labels = {True: "望ましい", False: "望ましくない"}
tints = {True: COLOURS[0], False: COLOURS[1]}

# %%
drawn, (axes,) = figure(1, 2, panel=(4.2, 2.9))
axes[0].plot(u, prospect, color=GREY)
axes[0].set(title="プロスペクト理論の価値", xlabel="参照点からの差")
for sign, good in ((1, True), (-1, False)):
    axes[1].plot(u, torch.sigmoid(sign * beta * u), color=tints[good],
                 label=labels[good])
axes[1].set(title="KTO の価値（β = 0.5）", xlabel="h − z₀（nat）")
axes[1].legend(loc="center right")
for ax in axes:
    ax.axvline(0, color=GREY, linestyle=":", linewidth=1)
drawn

# %% [markdown]
# **主張** 望ましい回答の価値は、参照点で $1/2$、得の側で上に凸、損の側で下に凸です。2 階微分は $v''=\beta^2\sigma(1-\sigma)(1-2\sigma)$ で、符号は $1-2\sigma$、つまり参照点のどちら側にいるかで決まります。

# %%
z0 = 1.0
h = torch.linspace(-9, 11, 401, dtype=torch.float64).requires_grad_()
value = torch.sigmoid(beta * (h - z0))
(slope,) = torch.autograd.grad(value.sum(), h, create_graph=True)
(curvature,) = torch.autograd.grad(slope.sum(), h, retain_graph=True)
claim("v″ = β²σ(1 − σ)(1 − 2σ)", curvature,
      beta**2 * value * (1 - value) * (1 - 2 * value))

# %%
right, left = curvature[h > z0 + 0.01], curvature[h < z0 - 0.01]
check("得の側で上に凸、損の側で下に凸",
      (right < 0).all() and (left > 0).all(),
      f"v″ は {right.min():.4f}〜{left.max():.4f}")

# %% [markdown]
# 2 つの価値は $\sigma(a)+\sigma(-a)=1$ で、互いの鏡像です。プロスペクト理論の 2.25 にあたる「損のほうが重い」という非対称は、 $\sigma$ の中には **ありません**。それを表すのは、次に出てくる重み $w_+,\ w_-$ です。

# %% [markdown]
# ### ステップ 2：損失と勾配
#
# 価値を大きくすることが、損失を小さくすることになるように、KTO の損失は
#
# $$
# \mathcal{L}_{\mathrm{KTO}}(\theta)=\mathbb{E}_{(x,y)\sim\mathcal{D}}\bigl[w(x,y)\,(1-v(x,y))\bigr],\qquad
# w(x,y)=\begin{cases}w_+&y\in\mathcal{Y}^+(x)\\ w_-&y\in\mathcal{Y}^-(x)\end{cases}
# $$
#
# とします。 $z_0$ は、その時点の方策から決まる数ですが、定数として扱い、勾配を流しません。
# $a=\beta(h_\theta-z_0)$ と書くと、一つの回答についての勾配は、望ましい回答なら $s=+1$、望ましくない回答なら $s=-1$ として、
#
# $$
# \nabla_\theta\mathcal{L}=-s\,w\,\beta\,\sigma(a)\,\sigma(-a)\,\nabla_\theta\log\pi_\theta(y\mid x)
# $$
#
# です。 `kto_loss` は、この損失を書いたパッケージの関数です（中身は「実装」で読みます）。

# %%
from companion.losses import kto_loss

point = torch.tensor(0.3, dtype=torch.float64)
y = world.responses.index("ab$")
theta = world.random_logits(g).requires_grad_()
logp = world.log_probs(theta)[:1, y]
(score,) = torch.autograd.grad(logp.sum(), theta, retain_graph=True)

# %%
a = beta * (logp - ref_logps[:1, y] - point)
weight = beta * torch.sigmoid(a) * torch.sigmoid(-a)
for good, s, w in ((True, 1, 1.5), (False, -1, 0.5)):
    loss = kto_loss(logp, ref_logps[:1, y], torch.tensor([good]), point,
                    beta, desirable_weight=1.5, undesirable_weight=0.5)
    (gradient,) = torch.autograd.grad(loss, theta, retain_graph=True)
    claim(f"{labels[good]}: ∇L = −s w βσ(a)σ(−a)∇log π",
          gradient, -s * w * weight * score)

# %% [markdown]
# 重み $\beta\,\sigma(a)\,\sigma(-a)$ は、参照点（ $a=0$ ）で最大値 $\beta/4$ をとり、 **両側** で 0 に近づきます（飽和）。DPO の重み $\beta\,\sigma(-m)$ は、マージン $m$ が負の側では $\beta$ に近づいたままでした。取り違えのひどい対ほど強く直すのが DPO、参照点から遠い回答は、良くも悪くも放っておくのが KTO です。

# %%
x = torch.linspace(-20, 20, 401, dtype=torch.float64)
kto_weight = beta * torch.sigmoid(beta * x) * torch.sigmoid(-beta * x)
drawn, ((ax,),) = figure(1, 1, panel=(5.8, 2.9))
ax.plot(x, kto_weight, color=COLOURS[0], label="KTO（横軸は h − z₀）")
ax.plot(x, beta * torch.sigmoid(-beta * x), color=GREY,
        label="DPO（横軸は 2 つの h の差）")
ax.set(title="勾配の重み（β = 0.5）",
       xlabel="h − z₀、または 2 つの h の差（nat）")
ax.legend(loc="upper right")
drawn

# %%
claim("重みの最大値は β/4", kto_weight.max(), beta / 4)
check("最大になるのは参照点", x[kto_weight.argmax()].abs() < 1e-9)
edge = max(kto_weight[0], kto_weight[-1])
check("両側で飽和する", edge < 1e-4, f"±20 nat で {edge:.0e}")

# %% [markdown]
# 論文は、これを「学びようのない例やラベルの付け間違いに引きずられにくい」という長所とみています。反対に、学習の途中で参照点から遠く下がってしまった良い回答は、正しいラベルが付いていても、ほとんど動かなくなります。

# %% [markdown]
# ### ステップ 3：参照点は何であるべきか、TRL は何を計算するか
#
# 論文の参照点は、方策が参照方策からどれだけ離れたか、です。
#
# $$
# z_0=\mathbb{E}_x\bigl[D_{\mathrm{KL}}[\pi_\theta(\cdot\mid x)\|\pi_{\mathrm{ref}}(\cdot\mid x)]\bigr]=\mathbb{E}_x\,\mathbb{E}_{y'\sim\pi_\theta(\cdot\mid x)}[h_\theta(x,y')]
# $$
#
# つまり「いまの方策の回答は、平均してどれだけ参照方策より出やすくなったか」です。回答 $y$ の $h_\theta$ がそれを上回れば得、下回れば損、というわけです。
# けれども、 $\pi_\theta$ から回答を引くのは高くつきます。そこで論文も TRL も、手元の **データの回答** を、同じバッチのほかのプロンプトと組み合わせて使います（組み違いの対）。
#
# $$
# \widehat z_0=\max\Bigl(0,\ \frac1B\sum_{i=1}^{B}h_\theta(x_i,y_{i-1})\Bigr),\qquad y_0=y_B
# $$
#
# データの回答は $\pi_\theta$ から引いたものではありません。期待値がどうなるか、正確に計算しましょう。
#
# **主張** 回答が分布 $\mu$ から引かれるなら、どんな $\mu$ と $\pi_\theta$ でも、対数確率比の期待値は 2 つの KL の差です（ $\mu$ が確率を持つ回答には、 $\pi_\theta$ も $\pi_{\mathrm{ref}}$ も確率を持つとします）。
#
# $$
# \mathbb{E}_{y'\sim\mu}[h_\theta(x,y')]=D_{\mathrm{KL}}[\mu\|\pi_{\mathrm{ref}}]-D_{\mathrm{KL}}[\mu\|\pi_\theta]
# $$

# %%
mu_logps = world.log_probs(world.random_logits(g))
mean_h = expect(mu_logps.exp(), logps_200 - ref_logps)
claim("E_μ[h] = KL(μ‖π_ref) − KL(μ‖π_θ)",
      mean_h, kl(mu_logps, ref_logps) - kl(mu_logps, logps_200))

# %% [markdown]
# $\mu=\pi_\theta$ なら $D_{\mathrm{KL}}[\pi_\theta\|\pi_{\mathrm{ref}}]$ で、ほしいものです。ところが $\mu=\pi_{\mathrm{ref}}$ なら、 $-D_{\mathrm{KL}}[\pi_{\mathrm{ref}}\|\pi_\theta]$、つまり **0 以下** です。
# 評価データは、学習を始める前の方策の回答から集めることが多いでしょう。まず、組み違いにせず、同じプロンプトの $\pi_{\mathrm{ref}}$ の回答を使ったときを確かめます。

# %%
at_ref = expect(ref_logps.exp(), logps_200 - ref_logps)
claim("μ = π_ref なら −KL(π_ref‖π_θ)", at_ref, -kl(ref_logps, logps_200))
check("だから 0 以下", at_ref.max() <= 0, f"最大 {at_ref.max():.3f}")


# %% [markdown]
# 組み違いの対の期待値を、この世界で計算します。プロンプトは 2 つなので、「ほかのプロンプト」は、もう一方のプロンプトです。データの回答は $\pi_{\mathrm{ref}}$ から引くとします。

# %%
def mismatched_mean(logps):
    """組み違いの対数確率比の、正確な期待値。"""
    other = ref_logps.exp().flip(0)  # もう一方のプロンプトの回答の確率
    return expect(other, logps - ref_logps).mean(-1)


wanted, raw = kl(logps_200, ref_logps).mean(-1), mismatched_mean(logps_200)
check("200 個の方策すべてで、KL より小さい", (raw < wanted).all(),
      f"差は {(wanted - raw).min():.3f} nat 以上")
negative = (raw < 0).double().mean()
check("負になる方策が多い", negative > 0.5, f"{negative:.1%}")

# %% [markdown]
# 参照方策から $\pi^*$ へ向かう道（ $\pi_{\mathrm{ref}}\exp(s\,r)$ を正規化したもので、 $s$ を 0 から $1/\beta$ まで増やします）の上でも見ましょう。学習がたどる道は、乱数で決めた方策よりも、こちらに近いでしょう（ステップ 4 で、実際の学習を見ます）。

# %%
strengths = torch.linspace(0, 1 / beta, 40).double()[:, None, None]
path = tilt(ref_logps, rewards * strengths)  # 0 で π_ref、1/β で π*
path_wanted, path_raw = kl(path, ref_logps).mean(-1), mismatched_mean(path)

drawn, ((ax,),) = figure(1, 1, panel=(5.8, 3.6))
ax.plot(wanted, raw, ".", color=GREY, alpha=0.6, label="乱数の方策 200 個")
ax.plot(path_wanted, path_raw, color=COLOURS[0], label="π_ref から π* への道")
ax.axline((0, 0), slope=1, color=GREY, linestyle=":", linewidth=1)
ax.axhline(0, color=COLOURS[1], linewidth=1)
ax.annotate("不偏なら、この線の上", (1.5, 1.2), color=GREY)
ax.annotate("これより下は 0 になる", (2.05, 0.15), color=COLOURS[1])
ax.set(title="組み違いの平均は、KL の推定になっていない",
       xlim=(-0.15, 3.3), ylim=(-2.6, 1.6),
       xlabel="KL(π‖π_ref)（nat）", ylabel="組み違いの h の期待値（nat）")
ax.legend(loc="lower right")
drawn

# %%
check("道の終わりでは、KL は大きいのに、組み違いの平均は負",
      path_wanted[-1] > 0.9 and path_raw[-1] < -1,
      f"KL {path_wanted[-1]:.3f}、組み違い {path_raw[-1]:.3f} nat")

# %% [markdown]
# 負の参照点では「いまの方策は平均して参照方策より出にくい」ことになってしまうので、0 で切ります。すると、バッチが十分に大きければ、道の上では $\widehat z_0$ はほとんど 0 のままです。
# 切ることには、もう一つ、値をバッチの大きさによって変えるという影響があります。 $\max(0,\cdot)$ は下に凸なので、平均してから切るのと、バッチごとに切ってから平均するのとでは、後者が小さくなることはなく、バッチによって符号が変わるなら、後者のほうが大きくなります。バッチが 2 行（プロンプトを 1 つずつ）のとき、すべての組み合わせを数え上げて確かめます。

# %%
h_star = star_logps - ref_logps
pair_mean = (h_star[0][None, :] + h_star[1][:, None]) / 2
chances = ref_logps[0].exp()[:, None] * ref_logps[1].exp()[None, :]
raw_pairs = (chances * pair_mean).sum()
clamped_pairs = (chances * pair_mean.clamp(min=0)).sum()
claim("切らなければ、バッチの平均の期待値は同じ",
      raw_pairs, mismatched_mean(star_logps))
check("切ってからの期待値は、期待値を切ったものより大きい",
      clamped_pairs > raw_pairs.clamp(min=0) + 0.1,
      f"切る前 {raw_pairs:.3f}、切った後 {clamped_pairs:.3f}")

# %% [markdown]
# つまり $\widehat z_0$ の期待値は、バッチの大きさでも変わり、バッチが小さいほど、0 から上へずれやすくなります。参照点は「KL の推定値」というより、「バッチごとに決まる、0 以上のずらし」と思っておくのが安全です。

# %% [markdown]
# ### ステップ 4：損失は σ の一次式で、行き先は π* ではない
#
# データが無限にあるとしましょう。プロンプトは一様に、回答は $\pi_{\mathrm{ref}}$ から引かれ（ここからは、プロンプトと回答の組が引かれる確率 $\pi_{\mathrm{ref}}(y\mid x)/2$ を $\mu(x,y)$ と書きます）、確率 $q(x,y)$ で「良い」、 $1-q(x,y)$ で「悪い」というラベルが付きます。
# ここでは、真の報酬が参照方策の平均 $V(x)=\mathbb{E}_{\pi_{\mathrm{ref}}}[r]$ より高いほど「良い」が付きやすい、 $q=\sigma(r-V)$ とします。

# %%
mu = ref_logps.exp() / 2  # プロンプトと回答の重み、全体の和が 1
V = expect(ref_logps.exp(), rewards)[:, None]
q = torch.sigmoid(rewards - V)


def population_loss(logps, z, w_plus=1.0, w_minus=1.0):
    value = torch.sigmoid(beta * (logps - ref_logps - z))
    mean = q * w_plus * (1 - value) + (1 - q) * w_minus * value
    return (mu * mean).sum((-2, -1))


# %% [markdown]
# **主張** $z_0=z$ を固定すると、損失は $\sigma(a)$ の **一次式** です。
#
# $$
# \mathcal{L}=\sum_{x,y}\mu(x,y)\Bigl\{q\,w_++\bigl[(1-q)\,w_--q\,w_+\bigr]\,\sigma\bigl(\beta(h_\theta(x,y)-z)\bigr)\Bigr\}
# $$

# %%
def linear_form(logps, z, w_plus, w_minus):
    slope = mu * ((1 - q) * w_minus - q * w_plus)
    value = torch.sigmoid(beta * (logps - ref_logps - z))
    return (mu * q * w_plus).sum() + (slope * value).sum((-2, -1))


for z, w_plus, w_minus in ((0.0, 1.0, 1.0), (0.7, 2.0, 0.5)):
    claim(f"z = {z}、w₊ = {w_plus}、w₋ = {w_minus}",
          population_loss(logps_200, z, w_plus, w_minus),
          linear_form(logps_200, z, w_plus, w_minus))

# %% [markdown]
# 角括弧の中の符号だけで、上げたい回答か下げたい回答かが決まります。 $q\,w_+<(1-q)\,w_-$ の回答では $\sigma$ を小さくするほど損失が減り、止まるところがありません。
# $w_+=w_-$ なら、境目は $q=1/2$、つまり **多数決** です。 $1-v$ は、ラベル（良いなら 1、悪いなら 0）と $\sigma(a)$ の差の絶対値でもあります。絶対値の誤差を最小にする予測は平均ではなく中央値、0 か 1 のどちらかなのです。
#
# **主張** 表形式の方策で、どのプロンプトにも $q\,w_+>(1-q)\,w_-$ の回答（多数決で良い回答）があるとします。 $z$ を固定した損失の下限では、 $q\,w_+<(1-q)\,w_-$ の回答（多数決で悪い回答）の確率は 0、 $h\to-\infty$ です。
#
# 理由は簡単です。悪い回答の確率を良い回答へ移すと、下げたい $\sigma$ は下がり、上げたい $\sigma$ は上がるので、損失は必ず減ります。200 個の方策で、悪い回答の確率を 10 分の 1 ずつにしていきます。

# %%
majority = q > 0.5
print("多数決で良い回答の数:", majority.sum(-1).tolist(), "/ 15")


def shrink_bad(logps, factor):
    """悪い回答の確率を factor 倍にし、減った分を良い回答に比例配分する。"""
    probs = logps.exp()
    bad_mass = (probs * ~majority).sum(-1, keepdim=True)
    grow = (1 - factor * bad_mass) / (1 - bad_mass)
    return (probs * torch.where(majority, grow, factor)).log()


# %%
shrunk = [
    population_loss(shrink_bad(logps_200, 10.0**-k), 0.0) for k in range(6)
]
drops = torch.stack(shrunk).diff(dim=0)
check("確率を移すたびに、200 個の方策すべてで損失が減る",
      drops.max() < 0, f"減り方は {-drops.max():.1e} 以上")

# %% [markdown]
# $\pi^*$ はすべての回答に正の確率を与えるので、この損失の最小点ではありえません。勾配も 0 ではないことを、このあと確かめます。
#
# 比べるために、 $1-v$ を $-\log v$ に替えてみます（BCO の損失と同じ形です）。ラベル 0 / 1 の交差エントロピーになり、最小点では $\sigma(a)=q$、つまり $a=r-V$ です。
# 参照点をプロンプトごとに $z(x)=V(x)/\beta-\log Z(x)$ に置けば、 $a=r-V$ となるのは $h=r/\beta-\log Z$、つまり $\pi^*$ です。すべての回答の $a$ が決まるので、最小点はこれだけです。

# %%
from torch.nn.functional import logsigmoid

z_star = V / beta - log_partition(ref_logps, rewards / beta)[:, None]
theta = world.logits_of(star_logps).requires_grad_()
logps = world.log_probs(theta)
a = beta * (logps - ref_logps - z_star)
cross_entropy = -(mu * (q * logsigmoid(a) + (1 - q) * logsigmoid(-a))).sum()

# %%
(gradient,) = torch.autograd.grad(cross_entropy, theta, retain_graph=True)
claim("交差エントロピーなら ∇L(π*) = 0", gradient, torch.zeros(()), tol=1e-12)

# %%
for name, z in (("同じ z(x)", z_star), ("z = 0", 0.0)):
    (gradient,) = torch.autograd.grad(
        population_loss(logps, z), theta, retain_graph=True
    )
    biggest = gradient.abs().max()
    check(f"KTO では π* で勾配が 0 にならない（{name}）", biggest > 1e-3,
          f"最大の成分 {biggest:.4f}")

# %% [markdown]
# KTO の集団の損失を、 $\pi_{\mathrm{ref}}$ から勾配法（Adam）で実際に下げてみます。参照点は、その時点の方策の「組み違いの平均」の期待値を 0 で切ったものです。

# %%
theta = ref_logits.clone().requires_grad_()
optimizer = torch.optim.Adam([theta], lr=0.1)
trace, points = [], []
for _ in range(601):
    logps = world.log_probs(theta)
    z = mismatched_mean(logps).clamp(min=0).detach()
    trace.append(logps.detach())
    points.append(z.item())
    optimizer.zero_grad()
    population_loss(logps, z).backward()
    optimizer.step()
trace = torch.stack(trace)  # (更新回数, X, Y)

# %%
drawn, (axes,) = figure(1, 2, panel=(4.4, 3.2))
for lines, is_good in ((majority, True), (~majority, False)):
    moved = (trace - ref_logps)[:, lines]
    axes[0].plot(moved, color=tints[is_good], linewidth=1, alpha=0.7)
    axes[0].plot([], [], color=tints[is_good],
                 label=f"多数決で{'良い' if is_good else '悪い'}回答")
axes[0].legend(loc="lower left")
axes[0].set(title="対数確率比", ylabel="h（nat）")
axes[1].plot(kl(trace, star_logps).mean(-1), color=GREY)
axes[1].set(title="π* までの距離", ylabel="KL(π‖π*)（nat）", ylim=(0, None))
for ax in axes:
    ax.set(xscale="symlog", xlabel="更新回数（対数目盛り）", xlim=(0, 600))
drawn

# %% [markdown]
# 悪い回答の対数確率比は、途中で少し戻るところもありますが、600 回までのあいだ、頭打ちになりません。わずかに悪い回答も、ひどく悪い回答も、向かう先は同じです。ステップ 2 で「参照点から遠い回答は放っておかれる」と言いました。勾配の重みはたしかに 0 に近づきますが、0 にはならず、向きも変わりません。Adam は勾配の大きさをそろえるので、小さな勾配でも進みつづけるのです。一方、良い回答のあいだでは確率の和という制約があるので、途中で落ち着きます。 $\pi^*$ には近づきますが、着きません。

# %%
worst = (trace - ref_logps)[:, ~majority].max(-1).values
check("悪い回答の h は、最も高いものでも下がりつづける",
      worst[600] < worst[60] - 2 and worst[60] < -3,
      f"60 回で {worst[60]:.2f}、600 回で {worst[600]:.2f} nat")

# %%
far = kl(trace, star_logps).mean(-1)
check("π* までの距離は残る", far[-1] > 0.1 and far[-1] > 0.9 * far[300],
      f"300 回で {far[300]:.3f}、600 回で {far[-1]:.3f} nat")
check("参照点は、ほとんど 0 のまま", max(points) < 0.05,
      f"最大 {max(points):.3f}、最後は {points[-1]:.3f} nat")

# %% [markdown]
# ### ステップ 5：重みは多数決の境目を動かす
#
# 境目の条件 $q\,w_+=(1-q)\,w_-$ を $q$ について解くと、
#
# $$
# q=\frac{w_-}{w_++w_-}
# $$
#
# です。式 (4.32) の重み $w_+,\ w_-$ は、ただの大きさの調整ではなく、「何割の人が良いと言えば、良い回答とみなすか」を決めています。
# 勾配の符号が境目で入れ替わることを確かめます。 $h_\theta$ のほうから見た、損失の傾きです。

# %%
def push(q_value, w_plus, w_minus):
    """h = z₀ にある回答の、損失の h についての傾き（負なら上げる向き）。"""
    logps = torch.zeros(2, dtype=torch.float64).requires_grad_()
    both = torch.tensor([True, False])
    loss = kto_loss(logps, torch.zeros(2).double(), both,
                    torch.tensor(0.0).double(), beta, w_plus, w_minus)
    up, down = torch.autograd.grad(2 * loss, logps)[0]
    return (q_value * up + (1 - q_value) * down).item()


# %%
import pandas as pd

borders = {}
for w_plus, w_minus in ((1.0, 1.0), (9.0, 1.0), (1.0, 1 / 9), (1.0, 3.0)):
    border = w_minus / (w_plus + w_minus)
    claim(f"境目 q = {border:.2f} で傾き 0",
          push(border, w_plus, w_minus), 0.0, tol=1e-12)
    below, above = (push(border + d, w_plus, w_minus) for d in (-.05, .05))
    check("境目の下では下げ、上では上げる", below > 0 > above,
          f"{below:+.4f}、{above:+.4f}")
    borders[f"w₊ = {w_plus:g}、w₋ = {w_minus:.3g}"] = {"境目の q": border}
pd.DataFrame(borders).T.round(3)

# %% [markdown]
# 良い評価が全体の 1 割しかないデータで $w_+=w_-$ とすると、ほとんどの回答が「多数決で悪い」ことになります。人によってラベルが割れるなら（どの回答の $q$ も $1/2$ に届かないなら）、良い回答も、です。ステップ 4 の主張は「良い回答がある」ことを条件にしていました。それがないと、確率は、 **だれも評価していない回答** へ流れます。
# $w_+=9$ とすれば、境目は $q=0.1$、平均的な回答のあたりに戻ります。実験 2 と実験 3 で、その違いを見ます。

# %% [markdown]
# ## 実装
#
# 損失と参照点を、そのまま NumPy で書きます。引数は、回答ごとの「トークンの対数確率の列」です。回答の長さはまちまちなので、リストに入れて渡します。

# %%
import numpy as np


def log_ratio(logps_i, ref_logps_i):
    return sum(logps_i[t] - ref_logps_i[t] for t in range(len(logps_i)))


def kto_reference_point_numpy(mismatched, ref_mismatched):
    total = 0.0
    for i in range(len(mismatched)):
        total += log_ratio(mismatched[i], ref_mismatched[i])
    return max(0.0, total / len(mismatched))


# %%
def kto_loss_numpy(tokens, ref_tokens, desirable, z0, beta, w_plus, w_minus):
    total = 0.0
    for i in range(len(tokens)):
        a = beta * (log_ratio(tokens[i], ref_tokens[i]) - z0)
        if desirable[i]:
            total += w_plus * (1 - 1 / (1 + np.exp(-a)))
        else:
            total += w_minus * (1 - 1 / (1 + np.exp(a)))
    return total / len(tokens)


# %% [markdown]
# 平均は、望ましい回答と望ましくない回答を **合わせた** B 行についてとります。それぞれで平均してから足すのではありません。
#
# パッケージの関数は、同じ式をベクトルで書いた PyTorch 版です。説明と入力の検査のあと、最後の数行が式です。

# %%
import inspect

from companion.losses import kto_reference_point

for function in (kto_reference_point, kto_loss):
    print(inspect.getsource(function))

# %% [markdown]
# 長さの違う 6 つの回答で、2 つの実装を比べます。

# %%
rng = np.random.default_rng(0)
lengths = rng.integers(1, 9, size=6)  # 長さは 1〜8
shifted = np.roll(lengths, 1)  # 組み違いの回答の長さ
token_logps = [
    [-rng.exponential(2.0, size=n) for n in sizes]
    for sizes in (lengths, lengths, shifted, shifted)
]
sums = [torch.tensor([row.sum() for row in side]) for side in token_logps]
desirable = torch.tensor([True, False, False, True, False, False])

# %%
z0_numpy = kto_reference_point_numpy(*token_logps[2:])
z0_torch = kto_reference_point(*sums[2:])

# %%
weights = dict(desirable_weight=2.0, undesirable_weight=0.5)
claim("参照点: NumPy = PyTorch", z0_numpy, z0_torch, tol=1e-12)
claim("損失: NumPy = PyTorch",
      kto_loss_numpy(*token_logps[:2], desirable, 1.5, 0.3, 2.0, 0.5),
      kto_loss(*sums[:2], desirable, torch.tensor(1.5).double(), 0.3,
               **weights), tol=1e-12)

# %% [markdown]
# 勾配は、数値微分と比べます（`gradcheck`）。参照方策にも参照点にも、勾配は流れません。

# %%
leaves = [side.clone().requires_grad_() for side in sums]
matches = torch.autograd.gradcheck(
    lambda logps: kto_loss(logps, leaves[1], desirable,
                           z0_torch, 0.3, **weights), leaves[:1]
)
check("自動微分の勾配 = 数値微分の勾配", matches)

# %%
point = kto_reference_point(*leaves[2:])
kto_loss(*leaves[:2], desirable, point, 0.3).backward()
check("参照方策にも参照点にも勾配は流れない",
      not point.requires_grad
      and all(leaf.grad is None for leaf in leaves[1:]))

# %% [markdown]
# 手計算とも合わせておきましょう。 $\beta=0.1$、対数確率比が $+2$ なら、 $z_0=0$ のときの損失は、望ましい回答で $1-\sigma(0.2)$、望ましくない回答で $1-\sigma(-0.2)$ です。
# 組み違いの平均が $-3$ のときも、0 で切られるので同じ値です。平均が $1$ なら、 $\pm0.2$ が $\pm0.1$ になります。

# %%
two, zero = torch.tensor([2.0]).double(), torch.tensor([0.0]).double()
for mean, gain in ((-3.0, 0.2), (1.0, 0.1)):
    point = kto_reference_point(torch.full((2,), mean), torch.zeros(2))
    for good, sign in ((True, 1), (False, -1)):
        loss = kto_loss(two, zero, torch.tensor([good]), point, 0.1)
        expected = 1 - 1 / (1 + np.exp(-sign * gain))
        claim(f"組み違いの平均 {mean:+g}、{labels[good]}", loss, expected)

# %% [markdown]
# 1 行だけでは、組み違いの対が作れません。パッケージの関数は、エラーにします。

# %%
try:
    kto_reference_point(torch.zeros(1), torch.zeros(1))
except ValueError as error:
    message = str(error)
check("1 行ではエラー", "at least 2 rows" in message, message)

# %% [markdown]
# ## TRL との照合
#
# ### 同じモデル、同じデータで、損失と勾配を比べる
#
# 相手は TRL の `KTOTrainer` そのものです。SFT 済みの小さなモデル（float64）を参照方策とし、その重みを少し動かしたものを方策とします。
# データは、「20未満の素数の合計は？」のような問題への回答 8 つです。ラベルは、正解なら True、間違いなら False とします。

# %%
from companion.lm import load

ref_model, tokenizer = load("prime-sums", dtype=torch.float64)
model, _ = load("prime-sums", dtype=torch.float64)
noise = torch.Generator().manual_seed(0)
with torch.no_grad():
    for p in model.parameters():
        p += 0.02 * torch.randn(p.shape, generator=noise, dtype=p.dtype)

# %%
from companion.tasks import PRIME_SUMS, demonstrations


def is_right(row):
    return {"label": row["completion"] == PRIME_SUMS.answer(row["prompt"])}


answers = demonstrations(PRIME_SUMS, 8, right=0.5, seed=0).map(is_right)
answers.to_pandas()

# %% [markdown]
# `unpaired_batch` は、TRL のコレータでバッチにします。組み違いの対（ `KL_` で始まる列）は、TRL と同じく、回答を 1 つずつずらして作ります。

# %%
from companion.oracle import trl_kto, unpaired_batch


def token_ids(texts, end=""):
    return tokenizer([text + end for text in texts])["input_ids"]


def batch_of(rows, labels=None):
    return unpaired_batch(
        token_ids(rows["prompt"]),
        token_ids(rows["completion"], end=tokenizer.eos_token),
        rows["label"] if labels is None else labels,
        pad_token_id=tokenizer.pad_token_id,
    )


# %%
from companion.lm import sequence_log_probs


def log_probs_of(lm, batch, prefix=""):
    """各行の log π(y|x)。prefix="KL_" なら、組み違いの対の。"""
    names = ("input_ids", "attention_mask", "completion_mask")
    inputs = {n: batch[prefix + n].to(lm.device) for n in names}
    return sequence_log_probs(lm, **inputs).cpu()


batch = batch_of(answers)
{name: tuple(tensor.shape) for name, tensor in batch.items()}

# %% [markdown]
# 参照点が正のときと、0 で切られるときの両方を確かめます。方策と参照方策を入れ替えれば、対数確率比の符号が逆になるので、必ず一方が正、他方が負になります。

# %%
def raw_mean(lm, ref_lm, batch):
    """組み違いの対数確率比の平均（0 で切る前）。"""
    with torch.no_grad():
        return (log_probs_of(lm, batch, "KL_")
                - log_probs_of(ref_lm, batch, "KL_")).mean()


forward = raw_mean(model, ref_model, batch)
backward = raw_mean(ref_model, model, batch)
claim("入れ替えると符号が逆になる", forward, -backward)


# %% [markdown]
# TRL の損失と全パラメータの勾配を、こちらの計算と比べます。重みも、あえて違う値にします。

# %%
def ours(lm, ref_lm, batch):
    """こちらの損失と、全パラメータについての勾配。"""
    with torch.no_grad():
        mismatched, ref_mismatched, ref_logps = (
            log_probs_of(ref_lm if ref else lm, batch, prefix)
            for ref, prefix in ((False, "KL_"), (True, "KL_"), (True, ""))
        )
    point = kto_reference_point(mismatched, ref_mismatched)
    loss = kto_loss(log_probs_of(lm, batch), ref_logps, batch["label"],
                    point, beta, **weights)
    names, parameters = zip(*lm.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return loss.item(), dict(zip(names, gradients, strict=True))


# %%
from companion.lm import token_log_probs


def tokens_of(lm, batch, prefix=""):
    """各回答のトークンの対数確率の列（NumPy 版に渡すもの）。"""
    ids, attention, mask = (
        batch[prefix + name]
        for name in ("input_ids", "attention_mask", "completion_mask")
    )
    logps = token_log_probs(lm, ids, attention, mask).detach()
    return [row[m.bool()].numpy() for row, m in zip(logps, mask, strict=True)]


def by_numpy(lm, ref_lm, batch):
    z0 = kto_reference_point_numpy(
        tokens_of(lm, batch, "KL_"), tokens_of(ref_lm, batch, "KL_")
    )
    return kto_loss_numpy(tokens_of(lm, batch), tokens_of(ref_lm, batch),
                          batch["label"], z0, beta, 2.0, 0.5)


# %%
cases = {
    "z₀ > 0": (model, ref_model, batch),
    "z₀ = 0（切られた）": (ref_model, model, batch),
    "True だけ": (model, ref_model, batch_of(answers, [True] * 8)),
    "False だけ": (model, ref_model, batch_of(answers, [False] * 8)),
}
table, reference = {}, {}
for name, case in cases.items():
    theirs = trl_kto(*case, tokenizer, beta=beta, **weights)
    loss, gradients = ours(*case)
    gap = max((gradients[n] - theirs.gradients[n]).abs().max().item()
              for n in gradients)
    check(f"{name}: 全パラメータの勾配が一致", gap <= 1e-12,
          f"最大差 {gap:.0e}")
    table[name] = by_numpy(*case), loss, theirs.loss.item()
    reference[name] = theirs.metrics["kl"]

# %%
parity = pd.DataFrame(table, index=["NumPy", "torch", "TRL"]).T
gaps = parity.max(axis=1) - parity.min(axis=1)
check("NumPy = torch = TRL", gaps.max() <= 1e-12, f"最大差 {gaps.max():.0e}")
parity = parity.map("{:.12f}".format)
parity["最大差"] = gaps.map("{:.0e}".format)
parity["TRL の kl"] = pd.Series(reference).round(4)
parity

# %% [markdown]
# ラベルが一種類だけのバッチでも、損失も勾配も計算できます。もちろん、それで何を学ぶかは別の問題です（実験 2）。
#
# ### サポートページのコードを CPU で動かす
#
# サポートページの `KTOTrainer` の例を、ノート PC の CPU で動かします。データは、プロンプト・回答・ラベルの 3 列です。

# %%
from datasets import Dataset

feedback_dataset = Dataset.from_list([
    {"prompt": "日本の首都は？", "completion": "東京です。", "label": True},
    {"prompt": "20未満の素数の合計は？", "completion": "78", "label": False},
    {"prompt": "日本の首都は？", "completion": "札幌です。", "label": False},
    {"prompt": "20未満の素数の合計は？", "completion": "77", "label": True},
])

# %%
import tempfile

from trl import KTOConfig, KTOTrainer

from companion.lm import checkpoint
from companion.training import train

trainer = KTOTrainer(
    model=str(checkpoint("prime-sums")),  # 変更 1
    processing_class=tokenizer,
    args=KTOConfig(
        output_dir=tempfile.mkdtemp(),  # 変更 2
        loss_type="kto",
        beta=0.1,
        desirable_weight=1.0,
        undesirable_weight=1.0,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        bf16=torch.cuda.is_available(),  # 変更 3
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,  # 表に出すために、毎回記録します
    ),
    train_dataset=feedback_dataset,
)
first_run = train(trainer)
first_run[["step", "loss", "kl", "rewards/margins"]]

# %%
claim("はじめの損失は 1/2", first_run["loss"].iloc[0], 0.5, tol=1e-6)

# %% [markdown]
# 変えたのは 3 か所で、かならず要るのは 3 つ目だけです（ほかに、記録を表にするため、 `logging_steps` を足し、 `trainer.train()` の代わりにパッケージの `train` を使いました）。
#
# 1. **モデルは、フォルダの場所で渡します。** `ref_model` を渡さないと、TRL は参照方策を「モデルが読み込まれた場所」から読み直すからです。メモリの中で作っただけのモデルには読み直す場所がないので、 `ref_model` も渡します。
# 2. **出力先は、一時フォルダにします。**
# 3. **`bf16` と、どこで動かすかを明示します。** 何も書かないと TRL は bf16 を使おうとし、CUDA のない多くのマシンではエラーになります。
#
# はじめの損失は、 $w_+=w_-=1$ なら、いつでも $1/2$ です。方策が参照方策と同じなので、 $h=0$、 $z_0=0$、価値はどれも $\sigma(0)$ だからです。
# 例のプロンプトを **交互に** 並べたのには理由があります。同じプロンプトの回答を続けて置くと、「1 つずらした回答」が同じプロンプトのものになり、組み違いになりません。TRL は、そこまでは見てくれません。

# %% [markdown]
# ここから先は、TRL の警告を画面に出さず、リスト `warned` に集めます。あとで読みます。

# %%
import logging

warned = []
listener = logging.Handler()
listener.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("trl.trainer.kto_trainer").handlers = [listener]
logging.getLogger("trl.trainer.kto_trainer").propagate = False


# %%
def error_of(build):
    try:
        build()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "エラーになりません"


folder = tempfile.mkdtemp()
on_cpu = dict(output_dir=folder, use_cpu=True, bf16=False)


def build_with(model=None, **config):
    return KTOTrainer(
        model or str(checkpoint("prime-sums")), processing_class=tokenizer,
        args=KTOConfig(**(on_cpu | config)), train_dataset=answers,
    )


# %% [markdown]
# バッチの大きさ 1 と、データを混ぜながら読む設定は、TRL が断ります。どちらも、組み違いの対が壊れるからです。メモリの中で作っただけのモデルも試します。

# %%
from companion.lm import new_model

refusals = {
    "バッチ 1": (dict(per_device_train_batch_size=1), "must be > 1"),
    "混ぜて読む": (dict(train_sampling_strategy="random"), "sequential"),
    "メモリの中のモデル": (dict(model=new_model()), "OSError"),
}
for name, (config, words) in refusals.items():
    message = error_of(lambda config=config: build_with(**config))
    check(name, words in message, message[:70] + "…")

# %%
bf16_error = error_of(lambda: KTOConfig(output_dir=folder))
if "bf16" in bf16_error:
    print("bf16 を書かない:", bf16_error[:60] + "…")
else:
    print("SKIPPED: このマシンでは、bf16 を書かなくても動きます")

# %% [markdown]
# ### 式と TRL の違い
#
# 損失の形は、見てきたとおり式と一致します。違いは、ほとんどが参照点 $z_0$ の作り方にあります。
#
# **z₀ は、0 で切られます。** 上の表の 2 行目では、組み違いの平均は負でした。

# %%
clamped = reference["z₀ = 0（切られた）"]
differences = {"z₀ を 0 で切る": f"平均 {backward:.4f} → z₀ = {clamped:g}"}
check("負の平均は 0 になる", backward < -0.1 and clamped == 0,
      differences["z₀ を 0 で切る"])

# %% [markdown]
# **z₀ は、バッチの切り方で変わります。** ずらすのは `per_device_train_batch_size` 行の中だけで、 $z_0$ もその中だけで平均します（GPU が複数なら、同時に処理する GPU のあいだでも平均してから、0 で切ります）。勾配蓄積で行数をそろえても、同じにはなりません。
# 同じ 4 行を、一度に 4 行（4×1）と、2 行ずつ 2 回の勾配蓄積（2×2）で渡します。学習率は 0 にします。

# %%
def trl_losses(rows, size, accumulation, steps=1, ref_lm=ref_model):
    """参照方策 ref_lm に対する方策 model の、TRL が記録する損失など。"""
    return train(KTOTrainer(
        model, ref_model=ref_lm, processing_class=tokenizer,
        train_dataset=rows,
        args=KTOConfig(
            beta=beta, per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation, max_steps=steps,
            learning_rate=0.0, logging_steps=1, save_strategy="no",
            gradient_checkpointing=False, report_to="none", **on_cpu,
        ),
    ))


# %%
four = answers.select(range(4, 8))
at_once = trl_losses(four, 4, 1)["loss"].item()
in_parts = trl_losses(four, 2, 2)["loss"].item()
differences["同じ 4 行を 4×1 と 2×2 で"] = f"{at_once:.5f} と {in_parts:.5f}"
check("4×1 と 2×2 で損失が違う", abs(at_once - in_parts) > 1e-4,
      differences["同じ 4 行を 4×1 と 2×2 で"])


# %%
def our_loss(rows):
    batch = batch_of(rows)
    h = (log_probs_of(model, batch) - log_probs_of(ref_model, batch)).detach()
    point = raw_mean(model, ref_model, batch).clamp(min=0)
    zeros = torch.zeros_like(h)
    return kto_loss(h, zeros, batch["label"], point, beta).item()


halves = [our_loss(four.select(part)) for part in ([0, 1], [2, 3])]
claim("4×1: こちらの値 = TRL", our_loss(four), at_once, tol=1e-6)
claim("2×2: 2 つの半分の平均 = TRL", np.mean(halves), in_parts, tol=1e-6)

# %% [markdown]
# **余った 1 行は、自分自身が「組み違い」です。** データの行数を割って 1 行余ると、最後のバッチの $z_0$ は $\max(0,h)$ になります。 $h>0$ なら $h-z_0=0$ なので、 $w_+=w_-=1$ なら、ラベルが何であっても損失はちょうど $1/2$ です。
# バッチの大きさ 1 は断るのに、余りの 1 行は通るのです。こちらの `kto_reference_point` は、上で見たとおりエラーにします。

# %%
with torch.no_grad():
    h_8 = log_probs_of(model, batch) - log_probs_of(ref_model, batch)
raised = int(h_8.argmax())  # 対数確率比がいちばん大きい行
five = answers.select([*range(4, 8), raised])
tail = trl_losses(five, 4, 1, steps=2).iloc[1]
claim("余った 1 行の z₀ = h", tail["kl"], h_8[raised], tol=1e-6)
claim("余った 1 行の損失は 1/2", tail["loss"], 0.5, tol=1e-6)
check("それでも勾配は 0 ではない", tail["grad_norm"] > 0.01,
      f"ノルム {tail['grad_norm']:.3f}")
differences["余った 1 行（h > 0）"] = f"損失 {tail['loss']:.6f}"

# %% [markdown]
# **平均は、ラベルによらず全行でとります。** 「ラベルごとに平均してから足す」という書き方も考えられますが、それとは違います。始まりの値（どの行も 1/2）で比べると、TRL の 0.5 に対して 1 です。行数に偏りがあれば、ラベルの重みも変わります。

# %%
same_logps = torch.zeros(4, dtype=torch.float64)
one_good = torch.tensor([True, False, False, False])
per_row = 1 - torch.sigmoid(same_logps)
class_means = per_row[one_good].mean() + per_row[~one_good].mean()
row_mean = kto_loss(same_logps, same_logps, one_good,
                    torch.tensor(0.0).double(), beta)
claim("全行の平均", row_mean, 0.5)
claim("ラベルごとの平均の和", class_means, 1.0)
differences["全行の平均とラベルごとの平均の和"] = (
    f"{row_mean:g} と {class_means:g}"
)

# %% [markdown]
# **データは並んだ順に読まれます。** 既定値は `train_sampling_strategy="sequential"` で、"random" は、上で見たとおり断られました。組み違いの対を、学習の前に決めてしまうからです。True の行をまとめて並べたデータを渡せば、前半は True だけ、後半は False だけで学習します。混ぜるのは、渡す側の仕事です。
#
# **ラベルが偏っていると、警告が出ます。** 重みの薦めも書いてあります。望ましい回答の数を $n_+$、望ましくない回答の数を $n_-$ として、 $w_+n_+$ が $w_-n_-$ の 1〜1.33 倍になる範囲です。

# %%
warned.clear()
KTOTrainer(str(checkpoint("prime-sums")), processing_class=tokenizer,
           args=KTOConfig(**on_cpu),
           train_dataset=answers.select([0, 1, 3, 6]))  # True は 1 行
advice = " ".join(warned)
at = advice.find("desirable_weight in")
check("1:3 なら w₊ は 3〜3.99", "[3.0, 3.99]" in advice, advice[at:at + 76])
differences["1:3 のデータへの薦め"] = advice[at:at + 31]

# %% [markdown]
# **ほかの `loss_type` もあります。** `apo_zero_unpaired` は、参照点を 0 に固定した KTO です（組み違いの対も作りません）。APO（[2408.06266](https://arxiv.org/abs/2408.06266)）の、対でないデータのための形です。

# %%
apo = trl_kto(model, ref_model, batch, tokenizer, beta=beta,
              loss_type="apo_zero_unpaired").loss
without_point = kto_loss(h_8, torch.zeros(8).double(), batch["label"],
                         torch.tensor(0.0).double(), beta)
claim("apo_zero_unpaired = z₀ を 0 とした KTO", apo, without_point, tol=1e-12)

# %% [markdown]
# EOS、パディング、長すぎる行、ドロップアウトの扱いは `DPOTrainer` と同じで、4.5.1 節のノートブックで一つずつ確かめました。また、TRL 1.16.0 は対数確率を float32 で計算します（版ごとの実測値は [RUNTIMES.md](../RUNTIMES.md) にあります）。
# 最後に、既定値を並べます。

# %%
defaults = KTOConfig(**on_cpu)
for name in ("beta", "desirable_weight", "undesirable_weight",
             "train_sampling_strategy", "learning_rate", "max_length",
             "per_device_train_batch_size", "gradient_checkpointing"):
    differences[f"既定値 {name}"] = str(getattr(defaults, name))
pd.DataFrame(differences.items(), columns=["式と TRL の違い", "測った値"])

# %% [markdown]
# ## 学習
#
# 小さな言語モデルを、TRL の `KTOTrainer` で学習させます。課題は 6 桁の数字の並べ替え（`780667>` → `066778`）です。
# 出発点のモデルは、4 割が正解、残りがもっともらしい間違い、という手本で学んであります（SFT）。答えは「知って」いますが、サンプリングすると半分以上まちがえます。
#
# 評価データは、半分が正解（ラベル True）、半分が間違い（False）です。ラベルに雑音はなく、同じプロンプトの 2 つの回答を比べることもありません。そして、作ったあとで **混ぜます**。

# %%
from companion.tasks import SORTING
from companion.training import preset


def feedback(n, share, seed):
    """n 行の評価データ。正解（True）の割合が share。"""
    rng = np.random.default_rng(seed)
    prompts = rng.permutation(SORTING.train_prompts)[:n].tolist()
    rows = []
    for i, x in enumerate(prompts):
        good = i < share * n
        y = SORTING.answer(x) if good else SORTING.mistake(x, rng)
        rows.append({"prompt": x, "completion": y, "label": good})
    return Dataset.from_list(rows).shuffle(seed=seed)


# %%
from dataclasses import asdict

kto_preset = preset("kto")
balanced = feedback(kto_preset.examples, share=0.5, seed=0)
balanced.select(range(6, 12)).to_pandas()

# %% [markdown]
# 大きさ、学習率、 $\beta$ は、パッケージの表（プリセット）から取ります。 $\beta$ は、この課題でよく学習することを確かめた値です。サポートページの $\beta=0.1$ は、すぐ後で試します。

# %%
pd.DataFrame([asdict(kto_preset)])


# %%
def train_kto(rows, beta, w_plus=1.0, w_minus=1.0, **changes):
    trainer = KTOTrainer(
        model=str(checkpoint("sorting", kto_preset.size)),
        processing_class=tokenizer,
        args=KTOConfig(
            loss_type="kto", beta=beta, desirable_weight=w_plus,
            undesirable_weight=w_minus, train_sampling_strategy="sequential",
            **kto_preset.arguments(**changes),
        ),
        train_dataset=rows,
    )
    return trainer.model, train(trainer)


# %%
trained_model, history = train_kto(balanced, kto_preset.beta)

# %%
from companion.plots import curves

both = {"望ましい": "chosen", "望ましくない": "rejected"}
curves(history, {
    "損失": "loss",
    "暗黙の報酬 βh": {label: f"rewards/{y}" for label, y in both.items()},
    "回答の対数確率": {label: f"logps/{y}" for label, y in both.items()},
    "参照点 z₀": "kl",
    "勾配のノルム": "grad_norm",
})

# %% [markdown]
# 損失は 0.5 から始まって下がります。望ましい回答の暗黙の報酬は少し上がり、望ましくない回答のほうは大きく下がっています。
# 参照点の図を見てください。記録された $z_0$ は、学習のあいだ 0 のままです。学習後のモデルで、0 で切る前の平均を測ってみましょう。

# %%
claim("はじめの損失は 1/2", history["loss"].iloc[0], 0.5, tol=1e-5)
check("記録された z₀ は小さいまま", history["kl"].max() < 0.05,
      f"最大 {history['kl'].max():.4f}")

# %%
sft_model, _ = load("sorting", kto_preset.size)
after_mean = raw_mean(trained_model, sft_model,
                      batch_of(balanced.select(range(64))))
check("切る前の平均は、学習後には負", after_mean < -0.5,
      f"{after_mean:.2f} nat")

# %% [markdown]
# 別のプロンプトの回答（別の数字を並べ替えたもの）は、学習で、参照方策よりさらに出にくくなったのです。この学習では、参照点は何もしていません。

# %% [markdown]
# 学習に使っていないプロンプトで、正解率を測ります。「貪欲法」は、いちばん確率の高い文字を選びつづけたとき、「サンプリング」は、温度 1 で引いたときです。
# 参照方策からの KL ダイバージェンスも、引いた回答の対数確率比の平均で見積もります。

# %%
from companion.lm import completion_batch, generate, measure

prompts = SORTING.test_prompts


def log_prob(lm, ys):
    rows = completion_batch(tokenizer, prompts, ys)
    with torch.no_grad():
        return sequence_log_probs(
            lm, **{name: ids.to(lm.device) for name, ids in rows.items()}
        ).cpu()


# %%
def report(lm):
    ys = generate(lm, tokenizer, prompts, max_new_tokens=8, temperature=1.0)
    kl_estimate = (log_prob(lm, ys) - log_prob(sft_model, ys)).mean().item()
    scores = measure(lm, tokenizer, SORTING, prompts, samples=2)
    return scores | {"KL(π‖π_ref)": kl_estimate}


before, after = report(sft_model), report(trained_model)
claim("学習前の KL は 0", before["KL(π‖π_ref)"], 0.0, tol=1e-6)

# %%
from companion.plots import before_after

titles = {"sampled": "サンプリング", "greedy": "貪欲法"}
before_after(
    {title: (before[key], after[key]) for key, title in titles.items()},
    limits=(0, 1), title="正解率",
)

# %%
rise = after["sampled"] - before["sampled"]
check("サンプリングの正解率が 0.2 以上あがる", rise > 0.2, f"+{rise:.3f}")
check("貪欲法の正解率は 0.9 以上を保つ", after["greedy"] > 0.9,
      f"{before['greedy']:.3f} → {after['greedy']:.3f}")

# %% [markdown]
# 同じプロンプト、同じ乱数で、回答を並べてみます。

# %%
samples = pd.DataFrame({"プロンプト": prompts[:8]})
for name, lm in (("学習前", sft_model), ("学習後", trained_model)):
    ys = generate(
        lm, tokenizer, prompts[:8], max_new_tokens=8, temperature=1.0
    )
    samples[name] = [
        f"{y} {'○' if y == SORTING.answer(x) else '×'}"
        for x, y in zip(prompts[:8], ys, strict=True)
    ]
samples

# %% [markdown]
# ### サポートページの β = 0.1 では
#
# ほかの設定はそのままで、 $\beta$ だけを 0.1 にします。

# %%
low_model, low_history = train_kto(balanced, beta=0.1)
low = report(low_model)

# %%
logged = ["logps/chosen", "logps/rejected"]
summary = pd.DataFrame({
    "学習前": before | history[logged].iloc[0].to_dict(),
    f"β = {kto_preset.beta:g}": after | history[logged].iloc[-1].to_dict(),
    "β = 0.1": low | low_history[logged].iloc[-1].to_dict(),
})
summary.T.round(3)

# %%
_, half, tenth = summary.loc["greedy"]
check("貪欲法の正解率は、β = 0.1 のほうが低い", tenth < half - 0.03,
      f"{half:.3f} と {tenth:.3f}")
_, half, tenth = summary.loc["sampled"]
check("サンプリングの正解率も、β = 0.1 のほうが低い", tenth < half - 0.05,
      f"{half:.3f} と {tenth:.3f}")

# %% [markdown]
# サンプリングの正解率は学習前より上がりましたが、 $\beta=0.5$ には及ばず、貪欲法の正解率は学習前より下がりました（1 回ずつの結果です）。
# $\beta$ が小さいと、重み $\beta\,\sigma(a)\,\sigma(-a)$ の山は低く、幅は広くなります（ステップ 2）。飽和が遠いので、参照方策からすでに離れた回答も、押されつづけます。 $\beta=0.1$ が悪い値だというのではなく、この小さなモデル、この学習率、この回数に合わないのです。

# %% [markdown]
# ## 実験
#
# もう一度「全部を数え上げられる世界」に戻ります。方策は表形式、損失は TRL と一致すると確かめた `kto_loss` と `kto_reference_point` です。実験 1 と実験 2 では 8 つの乱数の種（シード）を使い、実験 1 の図では点の一つ一つがシード、実験 2 の図では線が中央値、帯が最小値から最大値までです。
#
# はじめに、評価データを引く関数と、学習する関数を作ります。組み違いの対は、プロンプトが 2 つなので、もう一方のプロンプトの回答を使います。シードどうしはパラメータを共有しないので、まとめて平均しても、それぞれ独立に学習します。参照点は、シードごとに計算します。

# %%
from companion.exact import sample


def rate(probs, q, n, g):
    """プロンプトごとに n 個の回答を引き、確率 q で True のラベルを付ける。"""
    y = sample(probs, n, g)
    coins = torch.rand(y.shape, generator=g, dtype=torch.float64)
    return y, coins < q.gather(-1, y)


def kto_of_seeds(logps, ref_logps, y, labels, beta, w_plus, w_minus):
    """全シードの損失の平均。logps は (S, X, Y)、y と labels は (S, X, n)。"""
    at, ref_at, other, ref_other = (
        table.gather(-1, rows)
        for rows in (y, y.flip(-2)) for table in (logps, ref_logps)
    )
    points = torch.stack([
        kto_reference_point(mine.flatten(), ref.flatten())
        for mine, ref in zip(other, ref_other, strict=True)
    ])
    # 損失は h − z₀ だけで決まるので、シードごとの z₀ は参照方策の側に足す
    ref_at = ref_at + points[:, None, None]
    return kto_loss(at.flatten(), ref_at.flatten(), labels.flatten(),
                    torch.zeros((), dtype=at.dtype), beta, w_plus, w_minus)


# %%
def fit(theta, loss_of, steps=200, lr=0.1):
    """loss_of(log π) を Adam で小さくし、途中の log π をすべて返す。"""
    theta = theta.clone().requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    trace = []  # (更新回数, シード, プロンプト, 回答)
    for _ in range(steps + 1):
        logps = world.log_probs(theta)
        trace.append(logps.detach())
        optimizer.zero_grad()
        loss_of(logps).backward()
        optimizer.step()
        cosine.step()
    return torch.stack(trace)


def fit_kto(theta, ref_logps, data, beta, w_plus=1.0, w_minus=1.0):
    def loss_of(logps):
        return kto_of_seeds(logps, ref_logps, *data, beta, w_plus, w_minus)

    return fit(theta, loss_of)


# %% [markdown]
# ### 実験 1：報酬と KL の境界線の上に、KTO はいない
#
# 4.5.1 節のノートブックの実験 2 では、DPO の方策は、「KL をこれだけ使うなら、報酬はこれが上限」という境界線（フロンティア）の近くに着き、 $\beta$ で境界線の上の位置を選べました。KTO ではどうでしょうか。
# 世界を一つに決め、データだけを 8 通りに引き直します。DPO と IPO には 1,500 対、KTO には同じ数の回答、つまり 3,000 個の評価を、プロンプトごとに渡します。評価のラベルは、ステップ 4 と同じ $q=\sigma(r-V)$ です。

# %%
g = torch.Generator().manual_seed(1)
ref_logits_8 = world.random_logits(g, 8)
ref_logps_8 = world.log_probs(ref_logits_8)
rewards_8 = world.random_rewards(g, 8)

ref_one, rewards_one = ref_logps_8[:1], rewards_8[:1]
same_ref = ref_one.expand(8, -1, -1)
same_logits = ref_logits_8[:1].expand(8, -1, -1, -1)
V_one = expect(ref_one.exp(), rewards_one)[..., None]
q_one = torch.sigmoid(rewards_one - V_one).expand(8, -1, -1)

# %%
from companion.exact import sample_preferences
from companion.losses import dpo_loss, ipo_loss

y_w, y_l = sample_preferences(same_ref.exp(), rewards_one, 1_500, g)
rated = rate(same_ref.exp(), q_one, 3_000, g)


def fit_pairs(loss, b):
    def loss_of(logps):
        four = (table.gather(-1, y).flatten()
                for table in (logps, same_ref) for y in (y_w, y_l))
        return loss(*four, b)

    return fit(same_logits, loss_of)


# %%
def kl_and_reward(logps):
    reward = expect(logps.exp(), rewards_one)
    return kl(logps, ref_one).mean(-1), reward.mean(-1)


BETAS = (0.2, 0.5, 1.0, 2.0)
reached = {
    "DPO": {b: kl_and_reward(fit_pairs(dpo_loss, b)[-1]) for b in BETAS},
    "IPO": {b: kl_and_reward(fit_pairs(ipo_loss, b)[-1]) for b in BETAS},
    "KTO": {b: kl_and_reward(fit_kto(same_logits, same_ref, rated, b)[-1])
            for b in BETAS},
}

# %%
line_betas = torch.logspace(-1.3, 1.7, 200).double()[:, None, None]
frontier = kl_and_reward(tilt(ref_one, rewards_one / line_betas))
stars = {b: kl_and_reward(tilt(ref_one, rewards_one / b)) for b in BETAS}

drawn, (axes,) = figure(1, 3, panel=(3.7, 3.4))
for ax, (name, dots) in zip(axes, reached.items(), strict=True):
    ax.plot(*frontier, color=GREY, label="境界線")
    for colour, b in zip(COLOURS, BETAS, strict=False):
        ax.plot(*dots[b], "o", color=colour, label=f"β = {b} で学習")
        ax.plot(*stars[b], "x", color=colour, markersize=10, mew=2.5)
    ax.set(title=name, xlabel="KL(π‖π_ref)（nat）", ylabel="報酬の期待値",
           xlim=(-0.05, 2.4), ylim=(0, 1.4))
axes[1].plot([], [], "kx", markersize=8, mew=2, label="同じ色の β の π*")
axes[1].legend(loc="lower right")
drawn

# %% [markdown]
# IPO（和の形）の点は、同じ $\beta$ でも DPO より参照方策の近くにありますが、境界線からはほとんど離れていません（4.5.4.2 節のノートブックで詳しく見ます）。

# %%
def below_frontier(dots):
    """同じ KL での境界線の報酬から、どれだけ下か。"""
    order = frontier[0].argsort()
    at = np.interp(dots[0], frontier[0][order], frontier[1][order])
    return torch.from_numpy(at) - dots[1]


gap_table = pd.DataFrame({
    name: {f"β = {b}": below_frontier(dots[b]).quantile(0.5).item()
           for b in BETAS} for name, dots in reached.items()
})
gap_table.round(3)

# %%
kls = {name: [dots[b][0].quantile(0.5).item() for b in BETAS]
       for name, dots in reached.items()}
for name, values in kls.items():
    print(f"{name} の KL の中央値（β = 0.2〜2）:", np.round(values, 3))

# %%
check("KTO の β を 10 倍にしても、KL は 2 倍も変わらない",
      max(kls["KTO"]) < 2 * min(kls["KTO"]))
check("DPO では 5 倍以上変わる", max(kls["DPO"]) > 5 * min(kls["DPO"]))
lowest = torch.stack([below_frontier(reached["KTO"][b]) for b in BETAS])
check("KTO は、8 シード、4 通りの β のすべてで境界線の下",
      lowest.min() > 0.01, f"{lowest.min():.3f}〜{lowest.max():.3f}")
ratio = gap_table["KTO"] / gap_table["DPO"]
check("どの β でも、境界線からの隔たりの中央値は DPO の 3 倍以上",
      ratio.min() > 3, f"{ratio.min():.1f}〜{ratio.max():.1f} 倍")

# %% [markdown]
# DPO も、データが有限なので境界線より少し下に散らばります（シードによっては KTO と同じくらい離れます）。しかし中央値では、KTO の隔たりは DPO の 3 倍以上です。
#
# KTO がいつも下にいる理由は、ステップ 4 で見たとおりです。境界線の上の $\pi^*$ は、報酬の **大きさ** に応じて少しずつ確率を移します。KTO の損失は σ の一次式なので、回答を「多数決で良い」「悪い」の 2 つに分け、悪いほうは、わずかに悪い回答も、ひどく悪い回答も、同じように消そうとします。
# 少ししか悪くない回答を消すのにも KL を払うので、同じ KL で得られる報酬は減ります。そして、どこまで行くかを決めるのは主にラベルの分かれ方で、 $\beta$ ではほとんど選べません。

# %% [markdown]
# ### 実験 2：良い評価が 1 割しかないとき（数え上げられる世界）
#
# 実際の評価データは、たいてい偏っています。8 つの世界（参照方策も真の報酬も別々）で、「良い」が全体の 1 割になるように、 $q=\sigma(r-c(x))$ の $c(x)$ を決めます。
# 評価は、プロンプトごとに 2,000 個です。また、言語モデルには、だれも評価したことのない回答が無数にあります。それをまねて、評価されていない回答の代表として、空の回答（ `$` だけ）は評価データに出てこないことにします。

# %%
empty = world.responses.index("$")
rated_logps = ref_logps_8.clone()
rated_logps[..., empty] = -torch.inf
rated_probs = rated_logps.softmax(-1)

low_c, high_c = torch.full((2, 8, 2, 1), 20.0).double() * torch.tensor(
    [-1.0, 1.0])[:, None, None, None]
for _ in range(60):  # 二分法
    c = (low_c + high_c) / 2
    too_many = expect(rated_probs, torch.sigmoid(rewards_8 - c)) > 0.1
    low_c = torch.where(too_many[..., None], c, low_c)
    high_c = torch.where(too_many[..., None], high_c, c)
q_8 = torch.sigmoid(rewards_8 - c)

# %%
claim("「良い」の割合は 1 割", expect(rated_probs, q_8), 0.1)
check("多数決で良い回答は、一つもない", q_8.max() < 0.5,
      f"q の最大値 {q_8.max():.3f}")

# %%
g = torch.Generator().manual_seed(2)
data_8 = rate(rated_probs, q_8, 2_000, g)
WEIGHTS = {"w₊ = w₋ = 1": (1.0, 1.0), "w₊ = 9": (9.0, 1.0),
           "w₋ = 1/9": (1.0, 1 / 9)}
runs = {name: fit_kto(ref_logits_8, ref_logps_8, data_8, beta, *w)
        for name, w in WEIGHTS.items()}

# %%
from companion.plots import spread

unrated = {name: run[..., empty].exp().mean(-1).T
           for name, run in runs.items()}
earned = {name: expect(run.exp(), rewards_8).mean(-1).T
          for name, run in runs.items()}
shown = ("w₊ = w₋ = 1", "w₊ = 9")
drawn, (axes,) = figure(1, 2, panel=(4.4, 3.2))
for ax, lines, title in (
    (axes[0], unrated, "評価されていない回答の確率"),
    (axes[1], earned, "真の報酬の期待値"),
):
    for name, colour in zip(shown, COLOURS[1::-1], strict=True):
        spread(range(201), lines[name], label=name, ax=ax, colour=colour,
               xlabel="更新回数", title=title)
drawn

# %% [markdown]
# 重みがないと、確率は、だれも評価していない空の回答に吸い込まれていきます。データにある回答を **すべて** 下げれば、損失が減るからです。 $w_+=9$ なら、境目が $q=0.1$ になり、平均より良い回答が残ります。
# $w_-=1/9$ は、損失全体を 9 で割っただけです。勾配の大きさをそろえる Adam では、ほとんど同じ結果になるので、図では省きました。

# %%
end_unrated = {name: lines[:, -1] for name, lines in unrated.items()}
end_earned = {name: lines[:, -1] for name, lines in earned.items()}
plain, plus, minus = WEIGHTS
check("重みなし: 8 シードすべてで、空の回答が半分以上を占める",
      end_unrated[plain].min() > 0.5,
      f"{end_unrated[plain].min():.2f}〜{end_unrated[plain].max():.2f}")
for name in (plus, minus):
    check(f"{name}: 空の回答は 1 割未満", end_unrated[name].max() < 0.1,
          f"最大 {end_unrated[name].max():.3f}")

# %%
more = end_earned[plus] - end_earned[plain]
check("報酬は、8 シードすべてで重みつきのほうが高い", more.min() > 0.1,
      f"差は {more.min():.2f}〜{more.max():.2f}")

# %%
start_earned = earned[plus][:, 0]
better = end_earned[plus] - start_earned
check("重みつきでは、8 シードすべてで報酬が上がる", better.min() > 0.02,
      f"+{better.min():.2f}〜+{better.max():.2f}")
apart = (end_earned[plus] - end_earned[minus]).abs().max()
check("w₊ = 9 と w₋ = 1/9 はほとんど同じ", apart < 0.02, f"差 {apart:.1e}")

# %% [markdown]
# **ラベルが一種類だけなら** どうなるでしょうか。同じ回答のラベルを、すべて False、すべて True に書き換えます。

# %%
one_label = {}
for good in (False, True):
    labelled = data_8[0], torch.full_like(data_8[1], good)
    run = fit_kto(ref_logits_8, ref_logps_8, labelled, beta)
    one_label[good] = run[-1][..., empty].exp().mean(-1)
    start_empty = ref_logps_8[..., empty].exp().mean(-1)
    print(f"{labels[good]}だけ: 空の回答の確率の中央値 "
          f"{start_empty.quantile(0.5):.3f} → "
          f"{one_label[good].quantile(0.5):.3f}")
check("False だけなら、評価された回答から確率が逃げる",
      one_label[False].min() > 0.9, f"最小 {one_label[False].min():.3f}")
check("True だけなら、評価された回答に集まる",
      one_label[True].max() < 0.2, f"最大 {one_label[True].max():.3f}")

# %% [markdown]
# False だけのデータは「これではない」としか言っていないので、確率は評価されていないところへ逃げます。True だけのデータは、評価された回答に確率を集めるだけで、良し悪しは分かりません。どちらも損失は計算でき、エラーにもなりません。

# %% [markdown]
# ### 実験 3：良い評価が 1 割しかないとき（言語モデルと TRL）
#
# 同じことを、並べ替えの言語モデルで確かめます。正解（True）と間違い（False）を 1:9 にして、24 回の更新だけ学習します。乱数の種は 2 つです。

# %%
STEPS = 24
imbalanced = {}
for seed in (0, 1):
    rows = feedback(STEPS * kto_preset.batch_size, share=0.1, seed=seed)
    for name, w in WEIGHTS.items():
        lm, log = train_kto(rows, kto_preset.beta, *w,
                            max_steps=STEPS, seed=seed)
        ys = generate(lm, tokenizer, prompts, max_new_tokens=8,
                      temperature=1.0)
        right = [y == SORTING.answer(x)
                 for x, y in zip(prompts, ys, strict=True)]
        imbalanced[name, seed] = {
            "サンプリングの正解率": np.mean(right),
            "望ましい回答の βh": round(log["rewards/chosen"].iloc[-1], 2),
            "回答の例": repr(ys[0]),
        }
pd.DataFrame(imbalanced).T

# %%
rates = {name: [imbalanced[name, seed]["サンプリングの正解率"]
                for seed in (0, 1)] for name in WEIGHTS}
check("重みなし: 正解率はほぼ 0", max(rates[plain]) < 0.05,
      f"{rates[plain][0]:.3f}、{rates[plain][1]:.3f}")
for name in (plus, minus):
    check(f"{name}: 壊れない", min(rates[name]) > 0.3,
          f"{rates[name][0]:.3f}、{rates[name][1]:.3f}")

# %% [markdown]
# 重みなしでは、モデルは壊れます。望ましい回答の $\beta h$ も大きな負の値になり、書くもの（表の右端。はじめのプロンプトは 503626 です）は、数字の並べ替えですらありません。ただし、理由は実験 2 と少し違います。ここではラベルに雑音がなく、正解の回答だけを見れば $q=1$、間違いの回答では $q=0$ です。表形式の方策なら、1:9 でも正解の確率は上がります。確かめましょう。報酬がいちばん高い回答だけを「正解」とし、評価データの 1 割を正解にします。

# %%
best = rewards_8[..., 1:].argmax(-1, keepdim=True) + 1  # 空の回答は除く
is_best = torch.arange(len(world.responses)) == best
wrong_probs = torch.where(is_best, 0.0, rated_probs)
wrong_probs = 0.9 * wrong_probs / wrong_probs.sum(-1, keepdim=True)
clean_probs = torch.where(is_best, 0.1, wrong_probs)
clean = rate(clean_probs, is_best.double(), 1_000, g)
run = fit_kto(ref_logits_8, ref_logps_8, clean, beta)

# %%
best_prob = run.exp().gather(-1, best.expand(201, -1, -1, -1)).mean((-2, -1))
check("雑音のないラベルと表形式なら、重みなしでも正解の確率が上がる",
      (best_prob[-1] > best_prob[0] + 0.05).all(),
      f"8 シードで +{(best_prob[-1] - best_prob[0]).min():.3f} 以上")

# %% [markdown]
# 言語モデルでは、回答どうしがパラメータを共有しています。間違いの回答を下げる行が正解の 9 倍あり、その巻き添えで正解も下がる、と考えられます。どちらの場合も、重みで $w_+n_+$ と $w_-n_-$ をそろえると防げました（ $n_+,\ n_-$ は行の数）。
# $w_+=9$ と $w_-=1/9$ の結果は、実験 2 と違って、少し離れています。損失全体の大きさが 9 倍違うので、TRL が既定で行う勾配のクリッピング（ノルムを 1 で切る）などを通じて、差が出るのかもしれません。

# %% [markdown]
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/4.5.4.3-kto.ipynb](exercises/4.5.4.3-kto.ipynb) で、参照点と損失を自分で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **混ぜない** 学習のデータから `.shuffle(seed=seed)` を外すと、正解率はどうなるでしょうか。損失の曲線は、どんな形になるでしょうか。予想してから確かめてください。
# 3. **境目** 実験 2 で $w_+=3$ とすると、境目の $q$ はいくつになるでしょうか。空の回答の確率と報酬は、重みなしと $w_+=9$ のどちらに近くなるでしょうか。
# 4. **損失を替える** 実験 1 の `kto_loss` を、ステップ 4 の交差エントロピー（ $z_0=0$ ）に替えてください。 $\beta$ で KL を選べるようになるでしょうか。
# 5. **参照点** ステップ 4 の勾配法で、参照点を、組み違いの平均の代わりに正確な $D_{\mathrm{KL}}[\pi_\theta\|\pi_{\mathrm{ref}}]$ に替えてください。悪い回答の行き先と、良い回答のあいだの配分は、それぞれ変わるでしょうか。

# %% [markdown]
# ## 参考文献
#
# - Ethayarajh, Xu, Muennighoff, Jurafsky, Kiela. KTO: Model Alignment as Prospect Theoretic Optimization. 2024. [arXiv:2402.01306](https://arxiv.org/abs/2402.01306) KTO の論文です。ステップ 1〜3 はこの論文に沿っています。
# - Tversky, Kahneman. Advances in Prospect Theory: Cumulative Representation of Uncertainty. Journal of Risk and Uncertainty 5, 1992. ステップ 1 の価値関数の 0.88 と 2.25 は、この論文の値です。
# - Jung, Han, Nam, On. Binary Classifier Optimization for Large Language Model Alignment. 2024. [arXiv:2404.04656](https://arxiv.org/abs/2404.04656) BCO。ステップ 4 の交差エントロピーの損失を提案しました。
# - D'Oosterlinck ほか. Anchored Preference Optimization and Contrastive Revisions. 2024. [arXiv:2408.06266](https://arxiv.org/abs/2408.06266) `apo_zero_unpaired` の論文です。
# - Rafailov ほか. Direct Preference Optimization. 2023. [arXiv:2305.18290](https://arxiv.org/abs/2305.18290) 比べた相手の DPO。4.5.1 節で扱います。
# - TRL 1.12.0 `KTOTrainer`（`trl/trainer/kto_trainer.py`）。
