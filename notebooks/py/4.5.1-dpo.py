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
# # 4.5.1 DPO：報酬モデルを作らずに選好から学ぶ
#
# 本書 4.5.1 節の式 (4.19) を扱います。
#
# 選好データセットから報酬モデルを学習し、その報酬を強化学習で最大化する、というのが RLHF の二段構えでした。
# DPO（direct preference optimization）は、この二段を一つの分類問題にまとめます。
# このノートブックでは、式 (4.19) が出てくるまでの各ステップを小さな世界で実行し、TRL の `DPOTrainer` と値・勾配が一致することを確かめ、小さな言語モデルを学習させて、DPO で何が起き、何が起きないのかを目で見ます。
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
# | $x$ | `prompt` | – | `prompt` |
# | $y_w,\ y_\ell$ （好まれた回答、好まれなかった回答） | `chosen`, `rejected` | – | `chosen`, `rejected` |
# | $\log\pi_\theta(y_w\mid x),\ \log\pi_\theta(y_\ell\mid x)$ | `chosen_logps`, `rejected_logps` | (B,) | `chosen_logps`, `rejected_logps` |
# | $\log\pi_{\mathrm{ref}}(y_w\mid x),\ \log\pi_{\mathrm{ref}}(y_\ell\mid x)$ | `ref_chosen_logps`, `ref_rejected_logps` | (B,) | 同じ |
# | $\beta$ （KL 正則化の係数） | `beta` | – | `beta` |
# | $r(x,y)$ （真の報酬。学習する側には見えません） | `rewards` | (X, Y) | – |
# | $\pi^*$ （式 (4.9) を最大にする方策） | `star_logps` （対数確率） | (X, Y) | – |
# | $\widehat r_\theta(x,y)=\beta\log\frac{\pi_\theta(y\mid x)}{\pi_{\mathrm{ref}}(y\mid x)}$ （暗黙の報酬） | `implicit_rewards` | (X, Y) | `rewards/chosen`, `rewards/rejected` |
#
# B は対の数、X はプロンプトの数、Y は回答の数です。対数確率はすべて、EOS を含む回答のトークンについての **和** です（平均ではありません）。

# %% [markdown]
# ## 導出
#
# ### 全部を数え上げられる世界
#
# 各ステップを「実行」するために、とても小さな言語を用意します。文字は a と b の 2 つ、回答は最長 3 トークンです。
# 回答は EOS（ `$` と書きます）で終わるか、長さの上限で打ち切られます。打ち切られた回答も立派な回答なので、確率の和はちょうど 1 です。
# 期待値はどれも有限の和になり、等式の両辺を float64 で計算して比べられます。

# %%
from companion.exact import World

world = World(prompts=2, letters=2, max_length=3)
print(len(world.responses), "通りの回答:", " ".join(world.responses))

# %% [markdown]
# 方策は、プロンプトと、それまでに書いた文字列（接頭辞、7 通り）ごとに、次のトークン a, b, `$` のロジットを並べた **表** です。マスどうしはパラメータを共有しません。これを表形式の方策と呼びます。
# 参照方策 $\pi_{\mathrm{ref}}$ のロジットも、真の報酬 $r(x,y)$ も、乱数で決めます。

# %%
g = torch.Generator().manual_seed(0)
ref_logits = world.random_logits(g)
print("ロジットの表の形状:", tuple(ref_logits.shape))

ref_logps = world.log_probs(ref_logits)  # (X, Y)
rewards = world.random_rewards(g)  # (X, Y)
claim("Σ_y π_ref(y|x) = 1", ref_logps.exp().sum(-1), torch.ones(2))

# %% [markdown]
# ### ステップ 1：目的関数 (4.9) の最大点
#
# 出発点は RLHF の目的関数 (4.9) です。プロンプト $x$ ごとに、次の値を考えます（ $\beta>0$ とします）。
#
# $$
# J(\pi)=\mathbb{E}_{y\sim\pi(\cdot\mid x)}[r(x,y)]-\beta D_{\mathrm{KL}}[\pi(\cdot\mid x)\|\pi_{\mathrm{ref}}(\cdot\mid x)]
# $$
#
# **主張** これを最大にするのは、参照方策を報酬の指数で傾けた方策
#
# $$
# \pi^*(y\mid x)=\frac{1}{Z(x)}\pi_{\mathrm{ref}}(y\mid x)\exp\left(\frac{r(x,y)}{\beta}\right),\qquad
# Z(x)=\sum_y\pi_{\mathrm{ref}}(y\mid x)\exp\left(\frac{r(x,y)}{\beta}\right)
# $$
#
# で、そのときの値は $\beta\log Z(x)$ です。

# %%
from companion.exact import expect, kl, log_partition, tilt

beta = 0.5
star_logps = tilt(ref_logps, rewards / beta)
log_Z = log_partition(ref_logps, rewards / beta)

# %% [markdown]
# 1 つ目のプロンプトについて、15 通りの回答の確率を見てみましょう。境目は $r=\beta\log Z(x)$ （破線）です。報酬がそれより高い回答の確率が上がり、低い回答の確率が下がっています。

# %%
from companion.plots import COLOURS, GREY, figure

drawn, ((top,), (bottom,)) = figure(2, 1, panel=(8.4, 1.9))
places = torch.arange(len(world.responses))
top.bar(places, rewards[0], color=COLOURS[2])
top.axhline(beta * log_Z[0], color=GREY, linestyle="--", linewidth=1)
for label, logps, colour, shift in (
    ("π_ref", ref_logps, GREY, -0.2), ("π*", star_logps, COLOURS[0], 0.2)
):
    bottom.bar(places + shift, logps[0].exp(), 0.4, color=colour, label=label)
for ax, title in ((top, "真の報酬 r(x, y)"), (bottom, "回答の確率")):
    ax.set_title(title)
    ax.set_xticks(places, world.responses)
bottom.legend()
drawn

# %% [markdown]
# なぜこれが最大なのでしょう。 $\pi^*$ の定義から $r=\beta\log\frac{\pi^*}{\pi_{\mathrm{ref}}}+\beta\log Z$ です。これを $J$ に代入すると、
#
# $$
# J(\pi)=\mathbb{E}_{y\sim\pi}\left[\beta\log\frac{\pi^*}{\pi_{\mathrm{ref}}}+\beta\log Z-\beta\log\frac{\pi}{\pi_{\mathrm{ref}}}\right]
# =\beta\log Z(x)-\beta D_{\mathrm{KL}}[\pi\|\pi^*]
# $$
#
# となります。KL は負にならず、0 になるのは $\pi=\pi^*$ のときだけです。ランダムに作った 200 個の方策で確かめます。

# %%
def J(logps):
    return expect(logps.exp(), rewards) - beta * kl(logps, ref_logps)


logps_200 = world.log_probs(world.random_logits(g, 200))  # (200, X, Y)
shortfall = beta * kl(logps_200, star_logps)
claim("J(π*) = β log Z(x)", J(star_logps), beta * log_Z)
claim("J(π*) − J(π) = β KL(π‖π*)", J(star_logps) - J(logps_200), shortfall)

# %% [markdown]
# ### ステップ 2：式を逆に解いて、報酬を方策で書く
#
# 今使った式が、DPO の鍵です。 $\pi^*$ の式を $r$ について解くと、報酬が方策で書けます。
#
# $$
# r(x,y)=\beta\log\frac{\pi^*(y\mid x)}{\pi_{\mathrm{ref}}(y\mid x)}+\beta\log Z(x)
# $$

# %%
log_ratios = star_logps - ref_logps
claim("r = β log(π*/π_ref) + β log Z",
      rewards, beta * log_ratios + beta * log_Z[:, None])

# %% [markdown]
# ### ステップ 3：差をとると Z(x) が消える
#
# 困るのは $Z(x)$ です。言語モデルでは、すべての回答についての和など計算できません。
# ところが選好の確率（Bradley–Terry モデル）に現れるのは、同じプロンプトに対する 2 つの報酬の **差** だけです。
#
# $$
# P(y\succ y'\mid x)=\sigma\bigl(r(x,y)-r(x,y')\bigr)
# =\sigma\left(\beta\log\frac{\pi^*(y\mid x)}{\pi_{\mathrm{ref}}(y\mid x)}-\beta\log\frac{\pi^*(y'\mid x)}{\pi_{\mathrm{ref}}(y'\mid x)}\right)
# $$
#
# $Z(x)$ は $y$ によらないので、差をとれば消えます。

# %%
from companion.exact import bradley_terry

P = bradley_terry(rewards)  # P[x, y, y'] = P(y ≻ y'|x)
star_margins = beta * (log_ratios[:, :, None] - log_ratios[:, None, :])
claim("P(y≻y'|x) = σ(β × 対数確率比の差)", P, torch.sigmoid(star_margins))

# %% [markdown]
# 同じ理由で、プロンプトごとの定数 $c(x)$ を報酬に足しても、選好も $\pi^*$ も変わりません。選好データから分かるのは、プロンプトごとの報酬の差だけです。

# %%
shifted = rewards + torch.tensor([[3.0], [-7.0]])
claim("r + c(x) でも P は同じ", bradley_terry(shifted), P)
claim("r + c(x) でも π* は同じ", tilt(ref_logps, shifted / beta), star_logps)

# %% [markdown]
# ### ステップ 4：最尤推定から式 (4.19) へ
#
# $\pi^*$ の場所に学習する方策 $\pi_\theta$ を置けば、 $\pi_\theta$ は選好の確率を予測するモデルになります。その負の対数尤度が DPO の損失関数 (4.19) です。
#
# $$
# \mathcal{L}_{\mathrm{DPO}}(\theta)=-\mathbb{E}_{(x,y_w,y_\ell)\sim\mathcal{D}_{\mathrm{HF}}}\left[\log\sigma\left(\beta\log\frac{\pi_\theta(y_w\mid x)}{\pi_{\mathrm{ref}}(y_w\mid x)}-\beta\log\frac{\pi_\theta(y_\ell\mid x)}{\pi_{\mathrm{ref}}(y_\ell\mid x)}\right)\right]
# \tag{4.19}
# $$
#
# データは無限にあるとしましょう。2 つの回答が確率 $\mu(y,y'\mid x)$ で引かれ、どちらが好まれるかは真の報酬の Bradley–Terry モデルで決まるとします。引く順番には意味がないので、 $\mu(y,y'\mid x)=\mu(y',y\mid x)$ です。
# 対 $(y_w,y_\ell)$ は、 $y_w$ が先に引かれても後に引かれても現れるので、その確率は $2\mu(y_w,y_\ell)P(y_w\succ y_\ell)$ です（同じ回答が 2 回引かれたときは $P=1/2$ なので、2 倍と打ち消し合います）。期待値は、すべての対についての和になります。

# %%
from torch.nn.functional import logsigmoid

mu = ref_logps.exp()[:, :, None] * ref_logps.exp()[:, None, :]
claim("対の確率の和は 1", (2 * mu * P).sum((-2, -1)), torch.ones(2))


# %%
def margins_of(logps):
    implicit_rewards = beta * (logps - ref_logps)
    return implicit_rewards[..., :, None] - implicit_rewards[..., None, :]


def population_loss(logps, mu):
    return -(2 * mu * P * logsigmoid(margins_of(logps))).sum((-2, -1))


# %% [markdown]
# **主張** 損失の超過分 $\mathcal{L}(\pi)-\mathcal{L}(\pi^*)$ は、真の選好の確率から見た、方策の選好の確率の KL ダイバージェンスを平均したものです。
# 負になることはなく、対に現れるすべての 2 つの回答で選好の確率が一致したときにだけ 0 になります。

# %%
def label_kl(logps):
    truth, ours = star_margins, margins_of(logps)
    win = P * (logsigmoid(truth) - logsigmoid(ours))
    lose = (1 - P) * (logsigmoid(-truth) - logsigmoid(-ours))
    return (mu * (win + lose)).sum((-2, -1))


# %%
excess = population_loss(logps_200, mu) - population_loss(star_logps, mu)
claim("L(π) − L(π*) = E_μ[KL(P*‖P_π)]", excess, label_kl(logps_200))
check("200 個の方策の超過分は正", excess.min() > 0,
      f"最小 {excess.min():.4f}")

# %% [markdown]
# **主張** ラベルが真の報酬の Bradley–Terry モデルに従い、方策が $\pi^*$ を表せるなら（表形式なら、いつでも表せます）、対の重み $\mu$ がどうであっても、 $\pi^*$ は損失の最小点です（勾配は 0）。
# さらに、すべての回答が対で（間接的にでも）つながっていれば、最小点は $\pi^*$ **だけ** です。
#
# 選好の確率が一致すれば、つながった回答どうしで $\log\pi-\log\pi^*$ が等しくなります。全体がつながっていれば、その差は $y$ によらない定数で、確率の和が 1 なので 0 です。
#
# 重みをランダムに 5 通り変えて、確かめます。

# %%
star_logits = world.logits_of(star_logps)  # π* をトークンごとの方策に戻す
claim("log π* が元に戻る", world.log_probs(star_logits), star_logps)

# %%
mu_5 = torch.rand(5, *mu.shape, generator=g, dtype=mu.dtype)
mu_5 = (mu_5 + mu_5.mT) / 2  # μ(y,y') = μ(y',y)
mu_5 = mu_5 / mu_5.sum((-2, -1), keepdim=True)

theta = star_logits.expand(5, -1, -1, -1).clone().requires_grad_()
loss = population_loss(world.log_probs(theta), mu_5).sum()
(gradient,) = torch.autograd.grad(loss, theta)
claim("どの μ でも ∇L(π*) = 0", gradient, torch.zeros(()), tol=1e-12)

# %%
best = population_loss(star_logps, mu_5[:, None])
others = population_loss(logps_200, mu_5[:, None])
check("どの μ でも、200 個の方策の損失は π* より大きい",
      (others > best).all(), f"差は {(others - best).min():.3f} 以上")

# %% [markdown]
# ### ステップ 5：勾配を読む
#
# 一つの対 $(y_w,y_\ell)$ についての勾配は、次のようになります。 $m$ は暗黙の報酬の差（マージン）です。
#
# $$
# \nabla_\theta\mathcal{L}=-\beta\,\sigma(-m)\bigl(\nabla_\theta\log\pi_\theta(y_w\mid x)-\nabla_\theta\log\pi_\theta(y_\ell\mid x)\bigr),\qquad
# m=\widehat r_\theta(x,y_w)-\widehat r_\theta(x,y_\ell)
# $$
#
# 重み $\beta\,\sigma(-m)$ は、選好を大きく取り違えている対では $\beta$ に近く、もう区別できている対では 0 に近づきます。学習を始めるとき（ $\pi_\theta=\pi_{\mathrm{ref}}$ ）は、どの対でも $\beta/2$ です。
#
# `dpo_loss` は、式 (4.19) を書いたパッケージの関数です（中身は「実装」で読みます）。

# %%
from companion.losses import dpo_loss

y_w, y_l = world.responses.index("ab$"), world.responses.index("bba")
ref_pair = ref_logps[:1, y_w], ref_logps[:1, y_l]

theta = world.random_logits(g).requires_grad_()
logps = world.log_probs(theta)
loss = dpo_loss(logps[:1, y_w], logps[:1, y_l], *ref_pair, beta)
(loss_gradient,) = torch.autograd.grad(loss, theta, retain_graph=True)

# %%
m = margins_of(logps)[0, y_w, y_l]
log_prob_gap = logps[0, y_w] - logps[0, y_l]
(gap_gradient,) = torch.autograd.grad(log_prob_gap, theta, retain_graph=True)
claim("∇L = −βσ(−m)(∇log π(y_w) − ∇log π(y_l))",
      loss_gradient, -beta * torch.sigmoid(-m) * gap_gradient)

# %%
at_start = [x.clone().requires_grad_() for x in ref_pair]
loss = dpo_loss(*at_start, *ref_pair, beta)
(weight,) = torch.autograd.grad(-loss, at_start[0])
claim("π = π_ref のとき損失は log 2", loss, torch.tensor(2.0).double().log())
claim("そのとき重みは β/2", weight, beta / 2)

# %% [markdown]
# ### ステップ 6：DPO は、方策の姿をした報酬モデルの学習
#
# 4.4.2 節の報酬モデルの損失 (4.8) は $-\log\sigma(r_\phi(x,y_w)-r_\phi(x,y_\ell))$ の平均でした。
# DPO の勾配は、暗黙の報酬 $\widehat r_\theta$ をこの損失に入れ、連鎖律で $\theta$ まで戻したものです。
#
# $$
# \nabla_\theta\mathcal{L}_{\mathrm{DPO}}=\sum_{x,y}\frac{\partial\mathcal{L}_{\mathrm{RM}}}{\partial r(x,y)}\,\beta\,\nabla_\theta\log\pi_\theta(y\mid x),\qquad
# \frac{\partial\mathcal{L}_{\mathrm{RM}}}{\partial r(x,y)}=2\sum_{y'}\mu(y,y')\bigl(\widehat P(y\succ y')-P(y\succ y')\bigr)
# $$
#
# 右の式は、暗黙の報酬が予測する勝率 $\widehat P$ と実際の勝率 $P$ の差を、対の現れやすさ $2\mu$ で重みづけて足したものです。この式を手で書いて、左の式に入れてみます（プロンプトについては、平均でなく和をとった損失で確かめます。定数倍の違いだけです）。

# %%
theta = world.random_logits(g).requires_grad_()
logps = world.log_probs(theta)
(dpo_gradient,) = torch.autograd.grad(
    population_loss(logps, mu).sum(), theta, retain_graph=True
)

# %%
P_hat = torch.sigmoid(margins_of(logps)).detach()
dL_dr = 2 * (mu * (P_hat - P)).sum(-1)
(chained,) = torch.autograd.grad(
    logps, theta, grad_outputs=beta * dL_dr, retain_graph=True
)
claim("∇L_DPO = Σ ∂L_RM/∂r · β∇log π", dpo_gradient, chained)

# %% [markdown]
# ### ステップ 7：対に出てこない回答については、何も決まらない
#
# ステップ 4 で最小点が一つに決まったのは、すべての回答が対でつながっていたからでした。
# では、対が a で始まる回答の中だけから引かれるとどうなるでしょうか。損失は、 **その中での条件付き確率** だけで決まります。内と外の間で確率をいくら移しても、損失は変わりません。

# %%
inside = torch.tensor([y.startswith("a") for y in world.responses])
mu_inside = mu * inside[:, None] * inside[None, :]
mu_inside = mu_inside / mu_inside.sum((-2, -1), keepdim=True)
log_odds = torch.tensor([-3.0, -1.0, 2.0, 5.0]).double()[:, None, None]
moved = tilt(star_logps, torch.where(inside, 0.0, log_odds))

# %%
for label, some_logps in (("π*", star_logps), ("4 つの方策", moved)):
    outside = (some_logps.exp() * ~inside).sum(-1)[..., 0]
    print(f"{label}、1 つ目のプロンプトで外の確率", outside.numpy().round(4))
claim("内と外の間で確率を移しても L は同じ",
      population_loss(moved, mu_inside),
      population_loss(star_logps, mu_inside))

# %% [markdown]
# しかもこの 4 つの方策は、どれも損失の最小点です。内側の条件付き確率は $\pi^*$ と同じなのに、全体としては $\pi^*$ ではありません。

# %%
theta = world.logits_of(moved).requires_grad_()
loss = population_loss(world.log_probs(theta), mu_inside).sum()
(gradient,) = torch.autograd.grad(loss, theta)
claim("4 つの方策すべてで ∇L = 0", gradient, torch.zeros(()), tol=1e-12)

# %%
claim("内側の条件付き確率は π* と同じ",
      moved[..., inside].log_softmax(-1),
      star_logps[:, inside].log_softmax(-1))
closest = kl(moved, star_logps).min()
check("全体では π* ではない", closest > 0.01, f"KL(π‖π*) ≥ {closest:.3f}")

# %% [markdown]
# ### ステップ 8：好まれた回答の確率は、上がるとは限らない
#
# 損失が見ているのはマージンだけです。だから $\log\pi_\theta(y_w)$ が **下がっても**、 $\log\pi_\theta(y_\ell)$ がもっと下がれば損失は減ります。
# スコア関数を $s_w=\nabla_\theta\log\pi_\theta(y_w)$、 $s_\ell=\nabla_\theta\log\pi_\theta(y_\ell)$ と書くと、対が一つのとき、勾配法で動き始めるときの変化率は
#
# $$
# \frac{d}{dt}\log\pi_\theta(y_w)=\beta\,\sigma(-m)\bigl(\|s_w\|^2-\langle s_w,s_\ell\rangle\bigr),\qquad
# \frac{dm}{dt}=\beta^2\sigma(-m)\|s_w-s_\ell\|^2
# $$
#
# です。マージンは、 $s_w=s_\ell$ でないかぎり必ず増えます。ところが好まれた回答の確率は、 $\langle s_w,s_\ell\rangle>\|s_w\|^2$ のとき、そしてそのときに限って、下がり始めます。
#
# 回答ごとに特徴ベクトル $\varphi(y)$ があり、重み $\theta$ を **共有** する方策 $\pi_\theta(y)\propto\exp(\theta^\top\varphi(y))$ で確かめます。言語モデルの出力層で、トークンの代わりに、回答をまるごと一つの選択肢とみなした形です。

# %%
phi = torch.randn(200, 15, 6, generator=g, dtype=torch.float64)  # 200 の世界
theta = torch.randn(200, 6, generator=g, dtype=torch.float64)


def shared_logps(theta, phi):
    return torch.einsum("sd,syd->sy", theta, phi).log_softmax(-1)


# %% [markdown]
# この方策のスコア関数は $\nabla_\theta\log\pi_\theta(y)=\varphi(y)-\mathbb{E}_{y'\sim\pi_\theta}[\varphi(y')]$ です。各世界で、はじめの 2 つの回答を $y_w,\ y_\ell$ とします。学習の始まりなので、 $\sigma(-m)=1/2$ です。

# %%
start = shared_logps(theta, phi)
mean_phi = torch.einsum("sy,syd->sd", start.exp(), phi)
s_w, s_l = phi[:, 0] - mean_phi, phi[:, 1] - mean_phi
rate_w = beta / 2 * ((s_w**2).sum(-1) - (s_w * s_l).sum(-1))
rate_m = beta**2 / 2 * ((s_w - s_l) ** 2).sum(-1)

# %% [markdown]
# 自動微分で DPO の勾配を求め、その向きに動いたときの対数確率の変化率と比べます。

# %%
tracked = theta.clone().requires_grad_()
now = shared_logps(tracked, phi)
loss = dpo_loss(now[:, 0], now[:, 1], start[:, 0], start[:, 1], beta)
(gradient,) = torch.autograd.grad(200 * loss, tracked)  # 平均を和に戻す
_, change = torch.func.jvp(  # −勾配の向きに動いたときの log π の変化率
    lambda theta: shared_logps(theta, phi), (theta,), (-gradient,)
)

# %%
claim("d log π(y_w)/dt = βσ(−m)(‖s_w‖² − ⟨s_w,s_l⟩)", change[:, 0], rate_w)
claim("dm/dt = β²σ(−m)‖s_w − s_l‖²",
      beta * (change[:, 0] - change[:, 1]), rate_m)
falling = (change[:, 0] < 0).double().mean()
check("y_w の確率が下がり始める世界もある", falling > 0, f"{falling:.1%}")

# %% [markdown]
# 一方、表形式の方策では、対が一つなら決して下がりません。 $\|s_w\|^2-\langle s_w,s_\ell\rangle$ を 2 つの回答が分かれる前と後に分けて考えると、
#
# - 分かれる前は、2 つのスコアが同じなので、差は 0。
# - 分かれるところでは、 $y_w$ の次のトークンが $v$、 $y_\ell$ の次のトークンが $v'$ なら、 $1-p(v)+p(v')>0$。
# - 分かれた後は、同じマスを通ることがないので、 $\|\cdot\|^2\ge0$。
#
# です。すべての回答の対と 200 個の方策で調べます。

# %%
one_prompt = World(prompts=1, letters=2, max_length=3)
table_logits = one_prompt.random_logits(g, 200)
score_of = torch.func.vmap(torch.func.jacrev(one_prompt.log_probs))
score = score_of(table_logits)
score = score.flatten(3)[:, 0]  # (200, Y, パラメータ)

# %%
gram = score @ score.mT
# rates[:, y_w, y_l] = ‖s_w‖² − ⟨s_w, s_l⟩
rates = gram.diagonal(dim1=-2, dim2=-1)[:, :, None] - gram
rates = rates[:, ~torch.eye(15, dtype=torch.bool)]
check("表形式では、好まれた回答の確率が必ず上がり始める", rates.min() > 0,
      f"{rates.numel():,} 組の最小値 {rates.min():.4f}")

# %% [markdown]
# ## 実装
#
# 式 (4.19) を、そのまま NumPy で書きます。引数は、回答ごとの「トークンの対数確率の列」です。
# 回答の長さはまちまちなので、リストに入れて渡します。

# %%
import numpy as np


def log_ratio(logps_i, ref_logps_i):
    return sum(logps_i[t] - ref_logps_i[t] for t in range(len(logps_i)))


def dpo_loss_numpy(chosen, rejected, ref_chosen, ref_rejected, beta):
    total = 0.0
    for i in range(len(chosen)):
        margin = beta * log_ratio(chosen[i], ref_chosen[i])
        margin -= beta * log_ratio(rejected[i], ref_rejected[i])
        total += np.logaddexp(0.0, -margin)  # −log σ(m)、桁あふれなし
    return total / len(chosen)


# %% [markdown]
# パッケージの `dpo_loss` は、同じ式をベクトルで書いた PyTorch 版です。対数確率は、和をとってから渡します。説明と入力の検査のあと、最後の 4 行が式です。サポートページの `beta * delta_score` が、ここの `margin` です。

# %%
import inspect

print(inspect.getsource(dpo_loss))

# %% [markdown]
# 長さの違う 6 対で、2 つの実装を比べます。

# %%
rng = np.random.default_rng(0)
lengths = rng.integers(1, 9, size=(2, 6))  # 長さは 1〜8
token_logps = [
    [-rng.exponential(2.0, size=n) for n in lengths[side]]
    for side in (0, 1, 0, 1)  # 方策の y_w, y_l、参照方策の y_w, y_l
]
sums = [torch.tensor([y.sum() for y in side]) for side in token_logps]

# %%
claim("NumPy = PyTorch", dpo_loss_numpy(*token_logps, beta=0.3),
      dpo_loss(*sums, beta=0.3), tol=1e-12)

# %% [markdown]
# 勾配は、数値微分と比べます（`gradcheck`）。参照方策の対数確率はただのデータなので、勾配は流れません。

# %%
leaves = [x.clone().requires_grad_() for x in sums]
matches = torch.autograd.gradcheck(
    lambda a, b: dpo_loss(a, b, *leaves[2:], 0.3), leaves[:2]
)
check("自動微分の勾配 = 数値微分の勾配", matches)

# %%
dpo_loss(*leaves, 0.3).backward()
check("参照方策に勾配は流れない", leaves[2].grad is None)

# %% [markdown]
# 手計算とも合わせておきましょう。対数確率比の差が 2、 $\beta=0.1$ なら、損失は $-\log\sigma(0.2)=0.598\ldots$ です。

# %%
higher, lower = torch.tensor([-3.0]), torch.tensor([-5.0])
value = dpo_loss(higher, lower, lower, lower, beta=0.1)
claim("−log σ(0.1 × 2)", value, np.log1p(np.exp(-0.2)), tol=1e-6)

# %% [markdown]
# ## TRL との照合
#
# ### 同じモデル、同じデータで、損失と勾配を比べる
#
# 相手は TRL の `DPOTrainer` そのものです。SFT 済みの小さなモデル（float64）を参照方策とし、その重みを少し動かしたものを方策とします。
# データは、「20未満の素数の合計は？」のような問題の選好データ 8 対です。回答の長さはそろっていません。

# %%
from companion.lm import load

ref_model, tokenizer = load("prime-sums", dtype=torch.float64)
model, _ = load("prime-sums", dtype=torch.float64)
with torch.no_grad():
    for p in model.parameters():
        p += 0.02 * torch.randn(p.shape, generator=g, dtype=p.dtype)

# %%
from companion.tasks import PRIME_SUMS, preferences

pairs = preferences(PRIME_SUMS, 8, seed=0)
pairs.to_pandas().head(4)

# %% [markdown]
# 回答にはわざと間違いを混ぜ、ラベルにも雑音を入れてあります。たとえば 4 行目では、正解の 17 が好まれなかったほうに入っています。照合には、どちらが正しいかは関係ありません。

# %% [markdown]
# `preference_batch` は、TRL のコレータで対をバッチにします。前半の 8 行が好まれた回答、後半の 8 行が好まれなかった回答です。

# %%
from companion.oracle import preference_batch, trl_dpo


def token_ids(texts, end=""):
    return tokenizer([text + end for text in texts])["input_ids"]


# %%
eos = tokenizer.eos_token
batch = preference_batch(
    token_ids(pairs["prompt"]),
    token_ids(pairs["chosen"], end=eos),
    token_ids(pairs["rejected"], end=eos),
    pad_token_id=tokenizer.pad_token_id,
)
{name: tuple(tensor.shape) for name, tensor in batch.items()}

# %% [markdown]
# `trl_dpo` は、TRL のトレーナーの `compute_loss` をそのまま呼び、損失と、モデルの全パラメータについての勾配を返します。

# %%
theirs = trl_dpo(
    model, ref_model, batch, tokenizer, loss_type="sigmoid", beta=0.1
)

# %% [markdown]
# こちらは、同じモデルから対数確率を計算し、`dpo_loss` に渡します。

# %%
from companion.lm import sequence_log_probs

chosen_logps, rejected_logps = sequence_log_probs(model, **batch).chunk(2)
with torch.no_grad():
    ref_both = sequence_log_probs(ref_model, **batch).chunk(2)
ref_chosen_logps, ref_rejected_logps = ref_both
ours = dpo_loss(chosen_logps, rejected_logps, *ref_both, beta=0.1)

# %%
names, parameters = zip(*model.named_parameters(), strict=True)
gradients = torch.autograd.grad(ours, parameters, retain_graph=True)
gaps = [
    (gradient - theirs.gradients[name]).abs().max().item()
    for name, gradient in zip(names, gradients, strict=True)
]
claim("損失: PyTorch = TRL", ours, theirs.loss, tol=1e-12)
check("全パラメータの勾配が一致", max(gaps) <= 1e-12,
      f"{len(gaps)} 個のテンソルで最大差 {max(gaps):.0e}")

# %% [markdown]
# NumPy 版にも、トークンごとの対数確率を渡して、表にまとめます。

# %%
from companion.lm import token_log_probs


def completion_tokens(lm):
    """各回答のトークンの対数確率。好まれた 8 つと、好まれなかった 8 つ。"""
    logps = token_log_probs(lm, **batch).detach()
    masks = batch["completion_mask"].bool()
    kept = [row[m].numpy() for row, m in zip(logps, masks, strict=True)]
    return kept[:8], kept[8:]


# %%
import pandas as pd

of_tokens = *completion_tokens(model), *completion_tokens(ref_model)
by_numpy = dpo_loss_numpy(*of_tokens, beta=0.1)
claim("損失: NumPy = TRL", by_numpy, theirs.loss, tol=1e-12)

# %%
three = {"NumPy": by_numpy, "torch": ours.item(), "TRL": theirs.loss.item()}
spread_of_three = max(three.values()) - min(three.values())
three = {name: f"{value:.12f}" for name, value in three.items()}
three["最大差"] = f"{spread_of_three:.0e}"
pd.DataFrame([three], index=["式 (4.19)"])

# %% [markdown]
# ### サポートページのコードを CPU で動かす
#
# サポートページの `DPOTrainer` の例を、ノート PC の CPU で動かします。変えたのは 3 か所で、かならず要るのは 3 つ目だけです。

# %%
from datasets import Dataset

preference_dataset = Dataset.from_list([{
    "prompt": "日本の首都は？",
    "chosen": "東京です。",
    "rejected": "札幌です。",
}])

# %%
import tempfile

from trl import DPOConfig, DPOTrainer

from companion.lm import checkpoint

trainer = DPOTrainer(
    model=str(checkpoint("prime-sums")),  # 変更 1
    processing_class=tokenizer,
    args=DPOConfig(
        output_dir=tempfile.mkdtemp(),  # 変更 2
        loss_type="sigmoid",
        beta=0.1,
        bf16=torch.cuda.is_available(),  # 変更 3
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,  # 表に出すために、毎回記録します
    ),
    train_dataset=preference_dataset,
)

# %% [markdown]
# `trainer.train()` で学習します。このノートブックでは、それを呼んで進捗バーを表示し、学習の記録を表にして返す関数 `train` を使います。

# %%
from companion.training import train

train(trainer)[["step", "loss", "rewards/margins"]]

# %% [markdown]
# 1. **モデルは、フォルダの場所で渡します。** `ref_model` を渡さないと、TRL は参照方策を「モデルが読み込まれた場所」から読み直すからです。 `from_pretrained` で読み込んだモデルなら、そのまま渡せます。メモリの中で作っただけのモデルには読み直す場所がないので、 `ref_model` も渡します。
# 2. **出力先は、一時フォルダにします。** 例の `outputs/dpo` でも動きますが、ノートブックの隣にフォルダが増えます。
# 3. **`bf16` と、どこで動かすかを明示します。** 何も書かないと TRL は bf16 を使おうとし、CUDA のない多くのマシンではエラーになります（macOS では、エラーにならずに MPS の上で動くことがあります）。
#
# メモリの中で作っただけのモデルを渡したとき、また `bf16` を書かないとき、どうなるでしょうか。

# %%
def error_of(build):
    try:
        build()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:50]}…"
    return "エラーになりません"


folder = tempfile.mkdtemp()
on_cpu = dict(output_dir=folder, use_cpu=True, bf16=False)

# %%
from companion.lm import new_model


def in_memory():
    DPOTrainer(new_model(), args=DPOConfig(**on_cpu),
               processing_class=tokenizer, train_dataset=preference_dataset)


memory_error = error_of(in_memory)
check("メモリの中のモデル", "OSError" in memory_error, memory_error)

# %%
bf16_error = error_of(lambda: DPOConfig(output_dir=folder))
if "bf16" in bf16_error:
    print("bf16 を書かない:", bf16_error)
else:
    print("SKIPPED: このマシンでは、bf16 を書かなくても動きます")

# %% [markdown]
# ### 式と TRL の違い
#
# 損失そのものは、見てきたとおり式と一致します。違いは、式に書かれていないところ、つまり「何を対数確率として渡すか」にあります。一つずつ、数で確かめましょう。
#
# **EOS も回答の一部です。** TRL は、回答の終わりに EOS がなければ付け足し、その確率も和に入れます。

# %%
from companion.lm import completion_batch

differences = {}


def log_prob_of_77(eos):
    rows = completion_batch(
        tokenizer, ["20未満の素数の合計は？"], ["77"], eos=eos
    )
    with torch.no_grad():
        return sequence_log_probs(ref_model, **rows).item()


# %%
without_eos, with_eos = log_prob_of_77(eos=False), log_prob_of_77(eos=True)
differences["EOS も和に入る"] = f"log π: {without_eos:.4f} → {with_eos:.4f}"
check("EOS の分だけ小さい", with_eos < without_eos,
      differences["EOS も和に入る"])

# %% [markdown]
# **パディングは、値ではなく位置で見分けます。** パディングと EOS が同じトークンでも、回答の最後の EOS は消えません。
# 自分で `input_ids != pad_token_id` のようなマスクを作ると、この EOS を落としてしまいます。

# %%
columns = [[5]], [[6, 7, 0]], [[8, 9, 9, 9, 0]]  # EOS も PAD も 0 番
same_id = preference_batch(*columns, pad_token_id=0)
by_position = same_id["completion_mask"][0].sum()
by_value = (same_id["input_ids"][0, 1:] != 0).sum()
counts = f"位置では {by_position} トークン、値では {by_value}"
check("EOS が残る", by_position == 3 and by_value == 2, counts)
differences["パディングは位置で"] = counts

# %% [markdown]
# **長すぎるデータは、黙って切られるか、捨てられます。** プロンプトと回答を **つないだ長さ** が `max_length` （既定値 1024）を超えると、回答の後ろが切られ、EOS もなくなります。
# プロンプトだけで `max_length` に届いた行は、データセットから消えます。何行残ったかは、自分で確かめるしかありません（回答「77」が 3 トークンなのは、TRL が EOS を付け足したからです）。

# %%
three_rows = Dataset.from_list([
    dict(prompt=x, chosen="77", rejected="78")
    for x in ("1+", "1234+", "123456789+")
])


def with_max_length(n):
    return DPOTrainer(
        str(checkpoint("prime-sums")), processing_class=tokenizer,
        args=DPOConfig(max_length=n, **on_cpu), train_dataset=three_rows,
    )


# %%
short = with_max_length(6)
kept = len(short.train_dataset)
masks = short.data_collator(list(short.train_dataset))["completion_mask"]
cut = masks[:kept].sum(-1).tolist()
counts = f"3 行中 {kept} 行、回答は {cut} トークン"
check("1 行が消え、1 行は切られる", kept == 2 and cut == [3, 1], counts)
differences["max_length=6"] = counts

# %% [markdown]
# 一行も残らなくても、エラーが出るのは学習を始めてからで、理由は書かれていません。

# %%
empty_error = error_of(lambda: with_max_length(2).train())
check("0 行のとき", "num_samples" in empty_error, empty_error)

# %% [markdown]
# **参照方策は、フォルダから読み直されます。** 読み込んだ後でモデルの重みを変えても、 $\pi_{\mathrm{ref}}$ はフォルダの中身のままです。
# 読み込んだ後で別の重みを入れ、それが参照方策になると思って学習を始めると、最初の損失が log 2 になりません。

# %%
def first_loss(lm):
    trainer = DPOTrainer(
        lm, processing_class=tokenizer, train_dataset=pairs,
        args=DPOConfig(beta=1.0, max_steps=1, logging_steps=1, **on_cpu),
    )
    return train(trainer)["loss"].iloc[0]


# %%
untouched, changed = (load("prime-sums")[0] for _ in range(2))
changed.load_state_dict(load("sorting")[0].state_dict())
at_start, at_changed = first_loss(untouched), first_loss(changed)
claim("読み込んだままなら log 2", at_start, np.log(2), tol=1e-5)
losses = f"最初の損失 {at_start:.4f}、{at_changed:.4f}"
check("変えると log 2 から外れる", abs(at_changed - np.log(2)) > 0.5, losses)
differences["参照方策を読み直す"] = losses

# %% [markdown]
# **ドロップアウトには、止まるものと止まらないものがあります。** TRL は `disable_dropout=True` （既定値）で `torch.nn.Dropout` を止めます。
# ところが Qwen2 などの注意機構のドロップアウトは、`torch.nn.Dropout` ではなく関数として書かれているので、止まりません。公開されているモデルの多くではこの値が 0 なので、ふだんは気づかないだけです。

# %%
noisy, _ = load("prime-sums", dtype=torch.float64)
for layer in noisy.model.layers:
    layer.self_attn.attention_dropout = 0.5
same_weights = trl_dpo(noisy, ref_model, batch, tokenizer, beta=0.1).loss
check("参照方策と同じ重みなのに、損失が log 2 にならない",
      abs(same_weights - np.log(2)) > 1e-3, f"{same_weights:.4f}")
differences["注意機構のドロップアウト 0.5"] = f"損失 {same_weights:.4f}"

# %% [markdown]
# **引き分けは、不正解として数えられます。** 学習を始めるとき、方策は参照方策と同じなので、暗黙の報酬はどの回答でも 0 です。TRL が記録する `rewards/accuracies` は「好まれた回答のほうが大きい」割合なので、このとき 0.5 ではなく 0 になります。

# %%
same, _ = load("prime-sums", dtype=torch.float64)
tie = trl_dpo(same, ref_model, batch, tokenizer, beta=0.1)
tie_accuracy = tie.metrics["rewards/accuracies"]
claim("学習前の損失は log 2", tie.loss, np.log(2), tol=1e-12)
check("正解率は 0", tie_accuracy == 0, f"{tie_accuracy:.1f}")
differences["引き分け"] = f"学習前の正解率は {tie_accuracy:.1f}"

# %% [markdown]
# **文字列をつないでから、トークンに分けます。** プロンプトの終わりと回答の始まりがくっついて 1 つのトークンになるトークナイザでは、TRL は警告を出し（ここでは `setup` が止めています）、つないだ列をプロンプトのトークン数のところで切ります。回答の始まりは、消えてしまいます。
# 「ab」を 1 トークンにするトークナイザで見てみましょう。

# %%
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

words = ["<pad>", "<eos>", "a", "b", "ab"]
vocabulary = {word: i for i, word in enumerate(words)}
merging = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.BPE(vocabulary, [("a", "b")])),
    pad_token="<pad>",
    eos_token="<eos>",
)


# %%
def tokenized(row, tokenizer):
    """TRL がデータの 1 行をトークンにしたもの。"""
    return DPOTrainer(
        str(checkpoint("prime-sums")), processing_class=tokenizer,
        args=DPOConfig(**on_cpu), train_dataset=Dataset.from_list([row]),
    ).train_dataset[0]


seam = tokenized({"prompt": "a", "chosen": "b", "rejected": "a"}, merging)
kept_tokens = merging.convert_ids_to_tokens(seam["chosen_ids"])
check("「b」が消え、EOS だけが残る", kept_tokens == ["<eos>"], kept_tokens)
differences["つなぎ目のトークン"] = f"回答「b」に残るのは {kept_tokens}"

# %% [markdown]
# **会話形式では、EOS を付けるのはチャットテンプレートの仕事です。** 「アシスタントの番」を示す見出しは、プロンプトと回答をつないだ列に、ちょうど一度だけ現れます。
# 一方、テンプレートが回答の終わりに EOS を書かなければ、TRL は付け足しません。そのモデルは、いつ話し終えるかを学べなくなります。

# %%
_, chat = load("prime-sums")
chat.chat_template = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
turn = tokenized({
    "prompt": [{"role": "user", "content": "1+2"}],
    "chosen": [{"role": "assistant", "content": "3"}],
    "rejected": [{"role": "assistant", "content": "4"}],
}, chat)

# %%
turn_ids = turn["prompt_ids"] + turn["chosen_ids"]
text = chat.decode(turn_ids)
ends = turn_ids.count(chat.eos_token_id)
check("見出しは 1 回、EOS は 0 回", text.count("a:") == 1 and ends == 0, text)
differences["会話形式の EOS"] = f"{ends} 個（テンプレートに書かなければ）"

# %% [markdown]
# **TRL 1.16.0 は float32 で計算します。** 1.14.2 までは、モデルが float64 なら対数確率も float64 でした。対数確率を float32 に丸めると、損失はこれだけずれます（対数確率の絶対値が大きいほど、ずれも大きくなります。版ごとの実測値は [RUNTIMES.md](../RUNTIMES.md) にあります）。

# %%
rounded = dpo_loss(
    chosen_logps.float(), rejected_logps.float(),
    ref_chosen_logps.float(), ref_rejected_logps.float(), beta=0.1,
)
rounding = abs(rounded.double() - ours).item()
check("float32 の丸めの大きさ", 0 < rounding < 1e-6, f"{rounding:.0e}")
differences["1.16.0 は float32"] = f"損失の差 {rounding:.0e}"

# %% [markdown]
# **既定値** も見ておきます。学習率 1e-6 は大きな事前学習済みモデルのための値で、このノートブックの小さなモデルは、ほとんど動きません。

# %%
defaults = DPOConfig(**on_cpu)
for name in ("beta", "learning_rate", "max_length", "logging_steps",
             "per_device_train_batch_size", "gradient_checkpointing"):
    differences[f"既定値 {name}"] = str(getattr(defaults, name))
pd.DataFrame(differences.items(), columns=["式と TRL の違い", "測った値"])

# %% [markdown]
# ### ほかの `loss_type`
#
# `DPOTrainer` は、 `loss_type` を変えるだけで、DPO の派生手法の損失に切り替わります。上と同じデータ、同じモデルで、TRL の値を並べます。
# 式では $u=\log\frac{\pi_\theta(y_w)}{\pi_{\mathrm{ref}}(y_w)}$、 $v=\log\frac{\pi_\theta(y_\ell)}{\pi_{\mathrm{ref}}(y_\ell)}$、 $\Delta=u-v$ と書きます。 $\varepsilon$ は `label_smoothing` です（既定値は 0。 `exo_pair` では 0 だとエラーになるので 0.001、 `robust` では 0.1 にしました）。
#
# | `loss_type` | 損失（断りがなければ、対ごとの値の平均） | 出典 |
# |---|---|---|
# | `sigmoid` | $-\log\sigma(\beta\Delta)$ | DPO [2305.18290](https://arxiv.org/abs/2305.18290) |
# | `hinge` | $\max(0,1-\beta\Delta)$ | SLiC [2305.10425](https://arxiv.org/abs/2305.10425)、参照方策との比に使うのは RSO [2309.06657](https://arxiv.org/abs/2309.06657) |
# | `ipo` | $\left(\frac{u}{\lvert y_w\rvert}-\frac{v}{\lvert y_\ell\rvert}-\frac{1}{2\beta}\right)^2$ | IPO [2310.12036](https://arxiv.org/abs/2310.12036)。長さで割ることは論文に書かれていませんが、TRL のコメントによれば著者に確認したそうです |
# | `exo_pair` | $D_{\mathrm{KL}}[\mathrm{Bern}(\sigma(\beta\Delta))\,\Vert\,\mathrm{Bern}(1-\varepsilon)]$ | EXO [2402.00856](https://arxiv.org/abs/2402.00856) |
# | `nca_pair` | $-\log\sigma(\beta u)-\frac12\log\sigma(-\beta u)-\frac12\log\sigma(-\beta v)$ | NCA [2402.05369](https://arxiv.org/abs/2402.05369) |
# | `robust` | $\frac{-(1-\varepsilon)\log\sigma(\beta\Delta)+\varepsilon\log\sigma(-\beta\Delta)}{1-2\varepsilon}$ | Robust DPO [2403.00409](https://arxiv.org/abs/2403.00409) |
# | `bco_pair` | $-\log\sigma(\beta u)-\log\sigma(-\beta v)$ | BCO [2404.04656](https://arxiv.org/abs/2404.04656) の簡略版 |
# | `sppo_hard` | $\left(u-\frac{1}{2\beta}\right)^2+\left(v+\frac{1}{2\beta}\right)^2$ | SPPO [2405.00675](https://arxiv.org/abs/2405.00675) |
# | `aot` | $\log\frac{\pi_\theta(y_w)}{\pi_\theta(y_\ell)}$ と $\log\frac{\pi_{\mathrm{ref}}(y_w)}{\pi_{\mathrm{ref}}(y_\ell)}$ を、バッチの中で別々に並べ替え、その差 $\delta$ に $-\log\sigma(\beta\delta)$（ $\varepsilon=0$ のとき） | AOT [2406.05882](https://arxiv.org/abs/2406.05882) |
# | `aot_unpaired` | $u$ と $v$ を、バッチの中で別々に並べ替え、その差 $\delta$ に $-\log\sigma(\beta\delta)$（ $\varepsilon=0$ のとき） | AOT [2406.05882](https://arxiv.org/abs/2406.05882) |
# | `apo_zero` | $1-\sigma(\beta u)+\sigma(\beta v)$ | APO [2408.06266](https://arxiv.org/abs/2408.06266) |
# | `apo_down` | $\sigma(\beta u)+1-\sigma(\beta\Delta)$ | APO [2408.06266](https://arxiv.org/abs/2408.06266) |
# | `discopop` | $(1-\rho)(-\log\sigma(\beta\Delta))+\rho\,e^{-\beta\Delta}$、 $\rho=\sigma(\beta\Delta/\tau)$（ $\tau=0.05$ ） | DiscoPOP [2406.08414](https://arxiv.org/abs/2406.08414) |
# | `sft` | $-\log\pi_\theta(y_w)$ の、バッチ全体でのトークン平均 | 教師あり学習 |
# | `sigmoid_norm` | $-\log\sigma\left(\beta\frac{u}{\lvert y_w\rvert}-\beta\frac{v}{\lvert y_\ell\rvert}\right)$ | 長さで割った DPO、[2411.15124](https://arxiv.org/abs/2411.15124) |
#
# この表の式を自分で計算し、TRL の値と突き合わせます。

# %%
u = (chosen_logps - ref_chosen_logps).detach()
v = (rejected_logps - ref_rejected_logps).detach()
n_w, n_l = batch["completion_mask"].sum(-1).chunk(2)
bu, bv, bd = 0.1 * u, 0.1 * v, 0.1 * (u - v)
by_length = u / n_w - v / n_l
ls, sg = logsigmoid, torch.sigmoid

# %%
eps = torch.tensor(1e-3, dtype=torch.float64)
by_hand = {
    "sigmoid": -ls(bd),
    "hinge": torch.relu(1 - bd),
    "ipo": (by_length - 5) ** 2,  # 5 は 1/(2β)
    "exo_pair": sg(bd) * (ls(bd) - (1 - eps).log())
    + sg(-bd) * (ls(-bd) - eps.log()),
    "nca_pair": -ls(bu) - ls(-bu) / 2 - ls(-bv) / 2,
    "robust": (-0.9 * ls(bd) + 0.1 * ls(-bd)) / 0.8,
    "bco_pair": -ls(bu) - ls(-bv),
    "sppo_hard": (u - 5) ** 2 + (v + 5) ** 2,
}

# %%
policy_gap = (chosen_logps - rejected_logps).detach().sort().values
ref_gap = (ref_chosen_logps - ref_rejected_logps).sort().values
rho = sg(bd / 0.05)  # τ = 0.05 は TRL の既定値
by_hand |= {
    "aot": -ls(0.1 * (policy_gap - ref_gap)),
    "aot_unpaired": -ls(bu.sort().values - bv.sort().values),
    "apo_zero": 1 - sg(bu) + sg(bv),
    "apo_down": sg(bu) + 1 - sg(bd),
    "discopop": -(1 - rho) * ls(bd) + rho * torch.exp(-bd),
    "sft": -chosen_logps.detach().sum() / n_w.sum(),
    "sigmoid_norm": -ls(0.1 * by_length),
}

# %%
smoothing = {"exo_pair": 1e-3, "robust": 0.1}
trl_values = {
    name: trl_dpo(
        model, ref_model, batch, tokenizer, loss_type=name, beta=0.1,
        label_smoothing=smoothing.get(name, 0.0),
    ).loss.item()
    for name in by_hand
}
hand_values = {name: x.mean().item() for name, x in by_hand.items()}
pd.DataFrame({"TRL の値": trl_values, "式の値": hand_values}).round(6)

# %%
claim("15 通りの式 = TRL", list(hand_values.values()),
      list(trl_values.values()), tol=1e-6)

# %% [markdown]
# （`exo_pair` だけは、TRL が $\log\varepsilon$ を float32 で計算するので、5e-8 ほどずれます。）
#
# 表に漏れがないことも確かめます。知らない名前を渡すと、TRL は知っている名前をすべて教えてくれます。

# %%
import re

try:
    trl_dpo(model, ref_model, batch, tokenizer, loss_type="?")
except ValueError as error:
    known = set(re.findall(r"'(\w+)'", str(error)))
check("すべて載せた", known == set(by_hand), f"{len(known)} 種類")

# %% [markdown]
# ## 学習
#
# 小さな言語モデルを、TRL の `DPOTrainer` で学習させます。課題は 6 桁の数字の並べ替え（`780667>` → `066778`）です。
# 出発点のモデルは、4 割が正解、残りがもっともらしい間違い、という手本で学んであります（SFT）。答えは「知って」いますが、サンプリングすると半分以上まちがえます。
# ですから、ここで見るのは、新しい能力が生まれるところではなく、選好によって正解が **選び取られていく** ところです。
#
# 選好データは、手本と同じ分布から引いた、互いに異なる 2 つの回答を、真の報酬の Bradley–Terry モデルで比べたものです。
# 真の報酬は、合っている桁の数に、全部合っていれば 2 を足したものです。ラベルには雑音があり、ときには正解のほうが負けます。

# %%
from companion.tasks import SORTING
from companion.training import preset

dpo_preset = preset("dpo")
sort_pairs = preferences(SORTING, dpo_preset.examples, seed=0)
sort_pairs.to_pandas().head(4)

# %%
def share_right(column):
    answers = map(SORTING.answer, sort_pairs["prompt"])
    return np.mean(
        [y == a for y, a in zip(sort_pairs[column], answers, strict=True)]
    )


won, lost = share_right("chosen"), share_right("rejected")
print(f"正解が好まれた対 {won:.1%}、正解が好まれなかった対 {lost:.1%}、"
      f"どちらも間違い {1 - won - lost:.1%}")

# %% [markdown]
# 大きさ、学習率、 $\beta$ は、パッケージの表（プリセット）から取ります。 $\beta$ は、この課題でよく学習することを確かめた値です。サポートページの $\beta=0.1$ は、すぐ後で試します。

# %%
from dataclasses import asdict

pd.DataFrame([asdict(dpo_preset)])

# %%
def train_dpo(beta):
    trainer = DPOTrainer(
        model=str(checkpoint("sorting", dpo_preset.size)),
        processing_class=tokenizer,
        args=DPOConfig(
            loss_type="sigmoid", beta=beta, **dpo_preset.arguments()
        ),
        train_dataset=sort_pairs,
    )
    return trainer.model, train(trainer)


# %%
trained_model, history = train_dpo(dpo_preset.beta)

# %%
from companion.plots import curves

both = {"好まれた": "chosen", "好まれなかった": "rejected"}
curves(history, {
    "損失": "loss",
    "選好の正解率（学習データ）": "rewards/accuracies",
    "マージン": "rewards/margins",
    "回答の対数確率": {label: f"logps/{y}" for label, y in both.items()},
    "暗黙の報酬": {label: f"rewards/{y}" for label, y in both.items()},
    "勾配のノルム": "grad_norm",
})

# %% [markdown]
# 損失が下がり、マージンが増えています。マージンの増え方を見てください。好まれなかった回答の対数確率が大きく下がり、好まれた回答の対数確率も、上がるどころか少し下がっています（ステップ 8）。対数確率は回ごとに別のミニバッチの平均なので揺れますが、参照方策との差である暗黙の報酬では、はっきり見えます。
# 選好の正解率が 0 から始まるのは、はじめはすべて引き分けだからです。ラベルに雑音があるので、1 にはなりません。
#
# 学習に使っていないプロンプトで、正解率を測ります。「貪欲法」は、いちばん確率の高い文字を選びつづけたとき、「サンプリング」は、温度 1 で引いたときです。
# 参照方策からの KL ダイバージェンスも、引いた回答の対数確率比の平均で見積もります。

# %%
from companion.lm import generate, measure

sft_model, _ = load("sorting", dpo_preset.size)
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
    scores = measure(lm, tokenizer, SORTING, prompts)
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
gain = after["sampled"] - before["sampled"]
check("サンプリングの正解率が 0.2 以上あがる", gain > 0.2, f"+{gain:.3f}")
check("貪欲法の正解率は 0.95 以上を保つ", after["greedy"] > 0.95,
      f"{before['greedy']:.3f} → {after['greedy']:.3f}")
margin = history["rewards/margins"].iloc[-1]
check("マージンが増える", margin > 0.5, f"0 → {margin:.2f}")

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
# ほかの設定はそのままで、 $\beta$ だけを 0.1 にします。 $\beta$ が小さいほど、同じマージンを得るには、参照方策から遠くまで行かなければなりません。
# しかも Adam は勾配の大きさをそろえるので、 $\beta$ が小さくても、1 回の更新の大きさはあまり変わりません。

# %%
low_model, low_history = train_dpo(beta=0.1)
low = report(low_model)

# %%
logged = ["rewards/accuracies", "logps/chosen", "logps/rejected"]
summary = pd.DataFrame({
    "学習前": before | history[logged].iloc[0].to_dict(),
    f"β = {dpo_preset.beta:g}": after | history[logged].iloc[-1].to_dict(),
    "β = 0.1": low | low_history[logged].iloc[-1].to_dict(),
})
summary.T.round(3)

# %%
_, one, tenth = summary.loc["logps/chosen"]
check("β = 0.1 では、好まれた回答の対数確率がもっと下がる",
      tenth < one - 1, f"{one:.2f} と {tenth:.2f}")
_, one, tenth = summary.loc["greedy"]
check("貪欲法の正解率は、β = 0.1 のほうが低い",
      tenth < one - 0.02, f"{one:.3f} と {tenth:.3f}")

# %% [markdown]
# 選好の正解率はほとんど同じなのに、好まれた回答の対数確率は大きく下がり、参照方策からずっと遠くへ行きました。サンプリングの正解率は学習前より上がりましたが、 $\beta=1$ には及ばず、貪欲法の正解率は学習前より下がりました（1 回ずつの結果です）。
# $\beta=0.1$ が悪い値だというのではありません。この小さなモデル、この学習率、この回数では、参照方策から離れすぎるのです。

# %% [markdown]
# ## 実験
#
# ここからは、もう一度「全部を数え上げられる世界」に戻ります。方策は、断りがなければ表形式、損失は、TRL と一致すると確かめた `dpo_loss` です。
# 小さいので、8 つの乱数の種（シード）を一度に学習できます。図の線は 8 シードの中央値、帯は最小値から最大値までです。
#
# 道具は一つだけ、「対のデータで `dpo_loss` を Adam で小さくする」関数です。シードどうしはパラメータを共有しないので、まとめて平均しても、それぞれ独立に学習します。

# %%
def pair_loss(logps, ref_logps, data, beta):
    def at(table, y):
        return table.gather(-1, y).flatten()

    y_w, y_l = data
    return dpo_loss(
        at(logps, y_w), at(logps, y_l),
        at(ref_logps, y_w), at(ref_logps, y_l), beta,
    )


def fit(policy, theta, ref_logps, data, beta, steps=200, lr=0.1):
    """対 data = (y_w, y_l) で学習し、途中の log π をすべて返す。"""
    theta = theta.clone().requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    trace = []  # (更新回数, シード, プロンプト, 回答)
    for _ in range(steps + 1):
        logps = policy(theta)
        trace.append(logps.detach())
        optimizer.zero_grad()
        pair_loss(logps, ref_logps, data, beta).backward()
        optimizer.step()
        cosine.step()
    return torch.stack(trace)


# %% [markdown]
# ### 実験 1：学習した方策は π* にたどり着くか
#
# 8 つの世界（参照方策も真の報酬も別々）で、プロンプトごとに、参照方策から回答を 2 つずつ引き、真の報酬の Bradley–Terry モデルでラベルを付けます。
# 方策は $\pi_{\mathrm{ref}}$ から出発します。報酬そのものは、一度も見せません。

# %%
from companion.exact import sample_preferences

g = torch.Generator().manual_seed(1)
ref_logits_8 = world.random_logits(g, 8)
ref_logps_8 = world.log_probs(ref_logits_8)
rewards_8 = world.random_rewards(g, 8)
star_logps_8 = tilt(ref_logps_8, rewards_8 / beta)

# %%
distance = {}
for n in (100, 1_000, 10_000):
    data = sample_preferences(ref_logps_8.exp(), rewards_8, n, g)
    trace = fit(world.log_probs, ref_logits_8, ref_logps_8, data, beta)
    distance[f"{n:,} 対"] = kl(trace, star_logps_8).mean(-1).T

# %%
from companion.plots import spread

spread(range(201), distance, yscale="log", xlabel="更新回数",
       ylabel="KL(π‖π*)（nat）",
       title="π* までの距離、1 プロンプトあたりの対の数ごと")

# %% [markdown]
# 対が多いほど、 $\pi^*$ の近くまで行きます。対を 10 倍にするたびに、残る距離の中央値は 5 分の 1 以下になります。
# 対が足りないと、途中で $\pi^*$ に近づいたあと、ラベルの雑音を覚えて離れていきます。

# %%
last = [values[:, -1] for values in distance.values()]
medians = [values.quantile(0.5).item() for values in last]
check("10,000 対なら、8 シードすべてで π* の近くに着く",
      last[2].max() < 0.1, f"{last[2].min():.3f}〜{last[2].max():.3f}")
check("対が 10 倍になるごとに、距離は 5 分の 1 以下",
      medians[1] < medians[0] / 5 and medians[2] < medians[1] / 5,
      "中央値 " + " → ".join(f"{x:.3f}" for x in medians))

# %%
lowest = distance["100 対"].min(-1).values
check("100 対では、8 シードすべてで、いちど近づいてから離れる",
      (last[0] > 1.2 * lowest).all(),
      f"中央値 {lowest.quantile(0.5):.3f} → {medians[0]:.3f}")

# %% [markdown]
# ### 実験 2：β を変えて、報酬と KL の釣り合いを見る
#
# $\beta$ を変えると、 $\pi^*$ は「KL をこれだけ使うなら、報酬はこれが上限」という境界線（フロンティア）の上を動きます。
# DPO で学習した方策は、境界線に届くでしょうか。世界を一つに決め、データだけを 8 通りに引き直します。

# %%
ref_one, rewards_one = ref_logps_8[:1], rewards_8[:1]


def kl_and_reward(logps):
    reward = expect(logps.exp(), rewards_one)
    return kl(logps, ref_one).mean(-1), reward.mean(-1)


def exact(b):
    return kl_and_reward(tilt(ref_one, rewards_one / b))


# %%
BETAS = (0.5, 1.0, 2.0, 5.0)
same_ref = ref_one.expand(8, -1, -1)
same_logits = ref_logits_8[:1].expand(8, -1, -1, -1)
same_rewards = rewards_one.expand(8, -1, -1)
trained = {}
for n in (300, 3_000):
    data = sample_preferences(same_ref.exp(), same_rewards, n, g)
    for b in BETAS:
        trace = fit(world.log_probs, same_logits, same_ref, data, b)
        trained[n, b] = kl_and_reward(trace[-1])

# %%
many_betas = torch.logspace(-0.6, 1.3, 60).double()[:, None, None]
drawn, (axes,) = figure(1, 2, panel=(4.4, 3.4))
for ax, n in zip(axes, (300, 3_000), strict=True):
    ax.plot(*exact(many_betas), color=GREY, label="境界線")
    ax.axline([x.item() for x in exact(1.0)], slope=1.0, color=GREY,
              linestyle=":", linewidth=1, label="傾き 1 の接線")
    for colour, b in zip(COLOURS, BETAS, strict=False):
        ax.plot(*trained[n, b], "o", color=colour, label=f"β = {b} で学習")
        ax.plot(*exact(b), "x", color=colour, markersize=10, mew=2.5)
    ax.set(title=f"1 プロンプトあたり {n:,} 対", ylabel="報酬の期待値",
           xlabel="KL(π‖π_ref)（nat）", xlim=(-0.05, 2.1), ylim=(0, 1.4))
axes[1].plot([], [], "kx", markersize=8, mew=2, label="π*")
axes[1].legend(loc="lower right")
drawn

# %% [markdown]
# 灰色の線が正確な境界線、×がその $\beta$ での $\pi^*$、丸が 8 通りのデータで学習した方策です。
# 対が多ければ、丸はほぼ境界線に乗り、 $\beta$ が大きいほど×の近くに集まります。対が少ないと、丸は境界線の **下** に落ちます。同じだけ参照方策から離れても、雑音を覚えた分は報酬になりません。
#
# ステップ 1 の恒等式によれば、目的関数 $J$ の不足分は $\beta D_{\mathrm{KL}}[\pi\|\pi^*]$ でした。図では、×で境界線に引いた傾き $\beta$ の接線（点線は $\beta=1$ のもの）から、縦にどれだけ下にあるか、です。

# %%
def J_of(kl_and_r, b):
    return kl_and_r[1] - b * kl_and_r[0]


for b in BETAS:
    few, many = (J_of(exact(b), b) - J_of(trained[n, b], b)
                 for n in (300, 3_000))
    few_median, many_median = few.quantile(0.5), many.quantile(0.5)
    check(f"β = {b}: J(π*) には届かず、対が多いほど近い",
          many.min() >= 0 and many_median < few_median / 3,
          f"不足分の中央値 {few_median:.3f} → {many_median:.4f}")

# %% [markdown]
# ### 実験 3：マージンが増えながら、好まれた回答の確率が下がる
#
# ステップ 8 の条件を、実際の学習で見ます。特徴を共有する方策を 8 つ作り、それぞれで $\|s_w\|^2-\langle s_w,s_\ell\rangle$ がもっとも小さい対を一つ選んで、その対だけで学習します。
# 比較のために、同じ対を、表形式の方策でも学習します。

# %%
g = torch.Generator().manual_seed(2)
phi_8 = torch.randn(8, 15, 4, generator=g, dtype=torch.float64)
flat = torch.zeros(8, 4, dtype=torch.float64)


def shared_features(theta):
    return shared_logps(theta, phi_8)[:, None]


uniform = shared_features(flat)  # はじめは一様な方策

# %%
score_8 = phi_8 - phi_8.mean(1, keepdim=True)
gram_8 = score_8 @ score_8.mT
rates_8 = gram_8.diagonal(dim1=-2, dim2=-1)[:, :, None] - gram_8
rates_8.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)  # 自分自身との対は除く
smallest, index = rates_8.flatten(1).min(-1)
pair = [y[:, None, None] for y in (index // 15, index % 15)]
check("8 つとも、条件を満たす対がある", smallest.max() < 0,
      f"{smallest.min():.2f}〜{smallest.max():.2f}")

# %%
policies = {
    "特徴を共有": (shared_features, flat),
    "表形式": (one_prompt.log_probs, one_prompt.logits_of(uniform)),
}
moves = {}
for name, (policy, theta) in policies.items():
    trace = fit(policy, theta, uniform, pair, beta, steps=100, lr=0.02)
    up_or_down = trace - trace[0]
    moves[name] = {
        label: up_or_down.gather(-1, y.expand(101, 8, 1, 1)).squeeze().T
        for label, y in zip(("好まれた", "好まれなかった"), pair, strict=True)
    }

# %%
drawn, (axes,) = figure(1, 2, panel=(4.4, 3.2))
for ax, (name, lines) in zip(axes, moves.items(), strict=True):
    ax.axhline(0, color=GREY, linewidth=0.8)
    ax.set_ylim(-6.5, 2.5)
    spread(range(101), lines, ax=ax, xlabel="更新回数", title=name,
           ylabel="対数確率の変化（nat）")
drawn

# %%
down_w, down_l = (values[:, -1] for values in moves["特徴を共有"].values())
check("特徴を共有: 8 シードすべてで y_w の確率が下がる",
      down_w.max() < -0.2, f"{down_w.min():.2f}〜{down_w.max():.2f}")
check("それでもマージンは増える", (down_w - down_l).min() > 1,
      f"対数確率比の差は {(down_w - down_l).min():.2f} 以上")
up_w = moves["表形式"]["好まれた"][:, -1]
check("表形式: 8 シードすべてで上がる", up_w.min() > 0.3,
      f"{up_w.min():.2f}〜{up_w.max():.2f}")

# %% [markdown]
# だから、DPO の学習では `logps/chosen` と `logps/rejected` を **別々に** 描いてください。損失やマージンだけを見ていると、この現象は見えません。
#
# ### 実験 4：対がつながっていないと、π* にはたどり着かない
#
# ステップ 7 では、対に一度も出てこない回答がありました。ここでは、ほとんどの回答が対に出てきますが、最初の文字が違う回答どうしは一度も比べません。つながりが切れているだけで、同じことが起こります。

# %%
first_letter = world.tokens[:, 0]  # a は 0、b は 1、$ は 2


def given_first(logps, k):
    """最初のトークンが k である回答の、その中での条件付き対数確率。"""
    return logps[..., first_letter == k].log_softmax(-1)


def first_logps(logps):
    """最初のトークンの対数確率。"""
    masses = [logps[..., first_letter == k].logsumexp(-1) for k in range(3)]
    return torch.stack(masses, -1)


# %%
won, lost = [], []
for k in (0, 1):
    begins = (first_letter == k).nonzero().squeeze()
    better, worse = sample_preferences(
        given_first(ref_logps_8, k).exp(), rewards_8[..., begins], 3_000, g
    )
    won.append(begins[better])
    lost.append(begins[worse])
data = torch.cat(won, -1), torch.cat(lost, -1)
trace = fit(world.log_probs, ref_logits_8, ref_logps_8, data, beta)

# %%
parts = {"全体": kl(trace, star_logps_8).mean(-1).T}
for k, letter in enumerate("ab"):
    within = kl(given_first(trace, k), given_first(star_logps_8, k))
    parts[f"{letter} で始まる回答の中"] = within.mean(-1).T
stuck = kl(first_logps(ref_logps_8), first_logps(star_logps_8))

# %%
drawn = spread(
    range(201), parts, yscale="log", xlabel="更新回数",
    ylabel="KL(π‖π*)（nat）", title="最初の文字が違う回答を比べないと",
)
drawn.axes[0].axhline(stuck.mean(-1).quantile(0.5), color=GREY,
                      linestyle="--", linewidth=1)
drawn

# %% [markdown]
# KL は「最初の文字の KL」と「その先の条件付き KL の平均」に分かれます。減るのは後ろの項だけで、前の項（破線は 8 シードの中央値）は残ります。
# 最初の文字の確率には、勾配がまったく流れないからです。同じ文字で始まる 2 つの回答の差をとると、最初の文字の項は打ち消し合います（Adam は 0 に近い丸め誤差を拡大するので、ここだけ許容差を 1e-6 にしています）。

# %%
first = first_logps(trace[-1])
claim("最初の文字の確率は、学習しても参照方策のまま",
      first, first_logps(ref_logps_8), tol=1e-6)
later = sum(
    first[..., k].exp()
    * kl(given_first(trace[-1], k), given_first(star_logps_8, k))
    for k in range(3)
)
claim("KL(π‖π*) = 最初の文字の KL + その先の KL の平均",
      kl(trace[-1], star_logps_8),
      kl(first, first_logps(star_logps_8)) + later)

# %%
within = torch.cat(list(parts.values())[1:])
before_fit, after_fit = within[:, [0, -1]].quantile(0.5, dim=0)
check("中の距離は 10 分の 1 未満になる（中央値）",
      after_fit < before_fit / 10, f"{before_fit:.3f} → {after_fit:.3f}")
floor = stuck.mean(-1)
check("最初の文字の KL は、8 シードすべてで残る", floor.min() > 0.01,
      f"{floor.min():.3f}〜{floor.max():.3f}")

# %% [markdown]
# ### 実験 5：同じことを、TRL と言語モデルで
#
# 最後に、言語モデルでも同じことが起きるかを見ます。数え上げられる小さな言語（プロンプト 2 つ、文字 3 つ、回答は 2 文字まで）を言語モデルに覚えさせて参照方策とし、そこから引いた対で、TRL の `DPOTrainer` を 1 回走らせます。
#
# 表の世界では「aa」は打ち切られた回答でしたが、言語モデルでは「aa」の後にも EOS を書きます。また、表形式の方策と違って、言語モデルはどんな文字列でも書けます。数え上げた回答の **外** へ漏れた確率も測りましょう。

# %%
small = World(prompts=2, letters=3, max_length=2)
answers = [y.rstrip("$") for y in small.responses]
everything = completion_batch(
    tokenizer, ["1>"] * len(answers) + ["2>"] * len(answers), answers * 2
)
print(f"{len(answers)} 通りの回答:", answers)


# %%
def language_logps(lm):
    """小さな言語の、すべての回答の対数確率 (プロンプト, 回答)。"""
    inputs = {name: ids.to(lm.device) for name, ids in everything.items()}
    return sequence_log_probs(lm, **inputs).view(2, len(answers)).cpu()


# %% [markdown]
# まず、決めておいた分布を覚えさせ、フォルダに保存します。

# %%
g = torch.Generator().manual_seed(0)
target = small.log_probs(small.random_logits(g)).exp().float()
lm = new_model(seed=0)
optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
for _ in range(150):
    optimizer.zero_grad()
    loss = -(target * language_logps(lm)).sum(-1).mean()
    loss.backward()
    optimizer.step()

# %%
lm_folder = tempfile.mkdtemp()
lm.save_pretrained(lm_folder)
with torch.no_grad():
    lm_ref = language_logps(lm).double()
outside = 1 - lm_ref.exp().sum(-1)
print("数え上げた回答の外の確率:", outside.numpy().round(3))

# %% [markdown]
# この参照方策から対を引き、真の報酬で比べます。 $\pi^*$ は、数え上げた回答の中の参照方策を傾けたものです。

# %%
inside_ref = lm_ref.log_softmax(-1)
small_rewards = small.random_rewards(g)
small_star = tilt(inside_ref, small_rewards / beta)
small_data = sample_preferences(inside_ref.exp(), small_rewards, 2_500, g)

# %%
small_pairs = Dataset.from_list([
    {"prompt": prompt, "chosen": answers[i], "rejected": answers[j]}
    for prompt, better, worse in zip(("1>", "2>"), *small_data, strict=True)
    for i, j in zip(better.tolist(), worse.tolist(), strict=True)
])

# %% [markdown]
# 学習の途中、10 回の更新ごとに、数え上げた回答の確率をすべて計算します。

# %%
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """数え上げた回答の中での π* までの距離と、外の確率を記録する。"""

    def __init__(self):
        self.records = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step % 10 == 0:
            with torch.no_grad():
                logps = language_logps(model).double()
            far = kl(logps.log_softmax(-1), small_star).mean().item()
            leak = 1 - logps.exp().sum(-1).mean().item()
            self.records.append((state.global_step, far, leak))


# %%
watch = Watch()
arguments = dpo_preset.arguments(
    learning_rate=1e-3, lr_scheduler_type="cosine",
    per_device_train_batch_size=64, max_steps=121,  # 120 回のあとも測る
)
small_trainer = DPOTrainer(
    model=lm_folder, processing_class=tokenizer, train_dataset=small_pairs,
    args=DPOConfig(loss_type="sigmoid", beta=beta, **arguments),
    callbacks=[watch],
)
small_history = train(small_trainer)

# %% [markdown]
# 同じ参照方策、同じ対で学習した表形式の方策を、重ねて描きます。

# %%
tabular = fit(
    small.log_probs, small.logits_of(inside_ref)[None], inside_ref[None],
    [y[None] for y in small_data], beta, steps=120,
)
tabular_far = kl(tabular, small_star).mean((-2, -1))
updates, far, leak = zip(*watch.records, strict=True)

# %%
drawn, (axes,) = figure(1, 2, panel=(4.4, 3.2))
axes[0].plot(tabular_far, color=GREY, label="表形式")
axes[0].plot(updates, far, "o-", markersize=4, label="言語モデル（TRL）")
axes[0].set(yscale="log", title="数え上げた回答の中での距離",
            ylabel="KL(π‖π*)（nat）", xlabel="更新回数")
ticks = (0.02, 0.05, 0.1, 0.2, 0.5)
axes[0].set_yticks(ticks, ticks)
axes[0].minorticks_off()
axes[0].legend()
axes[1].plot(updates, leak, "o-", color=COLOURS[1], markersize=4)
axes[1].set(title="数え上げた回答の外", ylabel="確率", xlabel="更新回数")
drawn

# %%
check("数え上げた回答の中では、言語モデルも π* に近づく",
      far[-1] < far[0] / 2,
      f"KL {far[0]:.3f} → {far[-1]:.3f}")
check("外への漏れは 5 倍以上に増える", leak[-1] > 5 * leak[0],
      f"{leak[0]:.3f} → {leak[-1]:.3f}")

# %% [markdown]
# 何が漏れたのでしょうか。学習後のモデルから 400 回引いて、外の回答を数えます。

# %%
from collections import Counter

drawn_answers = generate(
    small_trainer.model, tokenizer, ["1>", "2>"] * 200,
    max_new_tokens=6, temperature=1.0,
)
strays = Counter(y for y in drawn_answers if y not in answers)
long = sum(n for y, n in strays.items() if len(y) > 2)
print(f"外は 400 回のうち {strays.total()} 回、うち 3 文字以上が {long} 回")
print("多い順に:", strays.most_common(6))

# %% [markdown]
# モデルは、数え上げた回答の **中では** $\pi^*$ に近づきながら、止まりどきを忘れ始めています。DPO の損失は外の回答の確率を見ていないので（ステップ 7）、増えても止めるものがありません。増え方は、学習率や乱数の種で大きく変わります（演習 5）。
# 表形式ほど $\pi^*$ に近づかないのは、1 回の更新で見る対が 64 個だけであること、パラメータを共有していることなどが考えられます。

# %% [markdown]
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/4.5.1-dpo.ipynb](exercises/4.5.1-dpo.ipynb) で、式 (4.19) を自分で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **ラベルの雑音** 実験 1 で、真の報酬を 3 倍にしてラベルの雑音を減らすと、1,000 対のときの距離はどう変わるでしょうか。予想してから確かめてください。3 倍にすると $\pi^*$ も動くことに注意しましょう。
# 3. **対の引き方** ステップ 4 では、対の重みを変えても最小点は $\pi^*$ のままでした。では、対の数が限られているとき、 $\pi_{\mathrm{ref}}$ から引くのと一様に引くのとでは、どちらが $\pi^*$ に近づくでしょうか。
# 4. **長さ** 対数確率の和の代わりに、トークンあたりの平均を `dpo_loss` に渡すと、最小点はどこへ動くでしょうか。ステップ 4 の「 $\pi^*$ で勾配が 0」を、平均に替えて調べてください（ `margins_of` の中で、 `logps - ref_logps` を長さ `world.mask.sum(-1)` で割ります）。
# 5. **漏れ** 実験 5 の学習率を 2e-4 に変えて、外へ漏れる確率を比べてください。乱数の種（ `dpo_preset.arguments(seed=…)` ）も変えてみましょう。損失の曲線だけから、漏れの違いに気づけるでしょうか。

# %% [markdown]
# ## 参考文献
#
# - Rafailov, Sharma, Mitchell, Ermon, Manning, Finn. Direct Preference Optimization: Your Language Model is Secretly a Reward Model. 2023. [arXiv:2305.18290](https://arxiv.org/abs/2305.18290) 式 (4.19) の論文です。ステップ 1〜5 はこの論文の導出に沿っています。
# - Bradley, Terry. Rank Analysis of Incomplete Block Designs: I. The Method of Paired Comparisons. Biometrika 39, 1952. ステップ 3 の選好モデルです。
# - Pal, Karkhanis, Dooley, Roberts, Naidu, White. Smaug: Fixing Failure Modes of Preference Optimisation with DPO-Positive. 2024. [arXiv:2402.13228](https://arxiv.org/abs/2402.13228) 好まれた回答の確率が下がる現象を扱います。
# - Razin, Malladi, Bhaskar, Chen, Arora, Hanin. Unintentional Unalignment: Likelihood Displacement in Direct Preference Optimization. 2024. [arXiv:2410.08847](https://arxiv.org/abs/2410.08847) ステップ 8 と実験 3 の現象の分析です。
# - Azar ほか. A General Theoretical Paradigm to Understand Learning from Human Preferences. 2023. [arXiv:2310.12036](https://arxiv.org/abs/2310.12036) 決定的な選好での DPO の振る舞いと IPO。4.5.4.2 節で扱います。
# - TRL 1.12.0 `DPOTrainer`（`trl/trainer/dpo_trainer.py`）。
