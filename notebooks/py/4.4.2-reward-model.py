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
# # 4.4.2 報酬モデル：比べた結果から点数を学ぶ
#
# 本書 4.4.2 節の式 (4.8) を扱います。
#
# 人に「この回答は何点ですか」と尋ねても、なかなかそろった答えは返ってきません。「どちらがよいですか」なら答えやすいので、RLHF では、比べた結果だけを集め、そこから点数を付けるモデル（報酬モデル、reward model）を学習します。
# このノートブックでは、式 (4.8) が最尤推定であることを小さな世界で実行しながら確かめ、比較から **何が分かり、何が分からないのか** をはっきりさせます。続いて、TRL の `RewardTrainer` と値・勾配が一致することを確かめ、小さな報酬モデルを学習させます。
# 最後に、その報酬を信じすぎるとどうなるか（過剰最適化、over-optimisation）を、数え上げられる世界と言語モデルの両方で見ます。
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
# | $r_\phi(x,y_w),\ r_\phi(x,y_\ell)$ （報酬モデルの点数） | `rewards_chosen`, `rewards_rejected` | (B,) | `rewards_chosen`, `rewards_rejected` |
# | $m=r_\phi(x,y_w)-r_\phi(x,y_\ell)$ （マージン） | `margins` | (B,) | `margin` |
# | $r(x,y)$ （真の報酬。学習する側には見えません） | `rewards` | (X, Y) | – |
# | $\mu(y,y'\mid x)$ （2 つの回答が対として引かれる確率） | `mu` | (X, Y, Y) | – |
# | $\pi_{\mathrm{ref}}(y\mid x)$ （参照方策。対の回答を引く方策） | `ref_logps` （対数確率） | (X, Y) | – |
#
# B は対の数、X はプロンプトの数、Y は回答の数です。

# %% [markdown]
# ## 導出
#
# ### 全部を数え上げられる世界
#
# 各ステップを「実行」するために、とても小さな言語を用意します。文字は a と b の 2 つ、回答は最長 3 トークンで、EOS（ `$` と書きます）で終わるか、長さの上限で打ち切られます。回答は 15 通りしかないので、期待値はどれも有限の和になり、等式の両辺を float64 で計算して比べられます。
# 真の報酬も、参照方策（プロンプトと接頭辞ごとに次のトークンのロジットを並べた表）も、乱数で決めます。

# %%
from companion.exact import World

world = World(prompts=2, letters=2, max_length=3)
g = torch.Generator().manual_seed(0)
ref_logps = world.log_probs(world.random_logits(g))  # (X, Y)
rewards = world.random_rewards(g)  # (X, Y)
print(len(world.responses), "通りの回答:", " ".join(world.responses))

# %% [markdown]
# ### ステップ 1：Bradley–Terry モデル
#
# 点数から「どちらが好まれるか」への橋渡しが、Bradley–Terry モデルです。
#
# $$
# P(y\succ y'\mid x)=\frac{e^{r(x,y)}}{e^{r(x,y)}+e^{r(x,y')}}=\sigma\bigl(r(x,y)-r(x,y')\bigr)
# $$
#
# 点数の差が 0 なら五分五分、1 なら約 73 %、3 なら約 95 % です。2 つの書き方が同じであることと、確率の和が 1 であることを確かめます。

# %%
from companion.exact import bradley_terry

P = bradley_terry(rewards)  # P[x, y, y'] = P(y ≻ y'|x)
strength = rewards.exp()
shares = strength[:, :, None] / (strength[:, :, None] + strength[:, None])
claim("σ(r − r') = eʳ/(eʳ + eʳ')", P, shares)
claim("P(y≻y') + P(y'≻y) = 1", P + P.mT, torch.ones(()))

# %%
for gap in (0.0, 1.0, 3.0):
    print(f"差 {gap:g} なら {torch.sigmoid(torch.tensor(gap)):.1%}")

# %% [markdown]
# ### ステップ 2：最尤推定から式 (4.8) へ
#
# 選好データセットの B 個の対が互いに独立なら、データの尤度は確率の積です。その対数をとって符号を変え、B で割ったものが、報酬モデルの損失関数です（下の $\mathbb{E}$ は、データの B 対についての平均です）。
#
# $$
# \mathcal{L}_{\mathrm{RM}}(\phi)=-\mathbb{E}_{(x,y_w,y_\ell)\sim\mathcal{D}_{\mathrm{HF}}}\left[\log\sigma\bigl(r_\phi(x,y_w)-r_\phi(x,y_\ell)\bigr)\right]
# \tag{4.8}
# $$
#
# 参照方策から回答を 2 つずつ引き、真の報酬でラベルを付けて、プロンプトごとに 20 対のデータを作ります。
# `reward_model_loss` は、式 (4.8) を書いたパッケージの関数です（中身は「実装」で読みます）。報酬モデルは、いまは回答ごとに点数を一つ持つ **表** です。

# %%
from companion.exact import sample_preferences
from companion.losses import reward_model_loss

y_w, y_l = sample_preferences(ref_logps.exp(), rewards, 20, g)
table = world.random_rewards(g)  # 学習前の、でたらめな報酬モデル


def data_loss(table, y_w, y_l):
    return reward_model_loss(
        table.gather(-1, y_w).flatten(), table.gather(-1, y_l).flatten()
    )


# %%
P_hat = bradley_terry(table)
of_prompt = torch.arange(2)[:, None]
likelihood = P_hat[of_prompt, y_w, y_l].prod()
print(f"尤度 {likelihood:.1e}")
claim("e^(−BL) ÷ Π P(y_w ≻ y_l|x) = 1",
      (-40 * data_loss(table, y_w, y_l)).exp() / likelihood, 1.0)

# %% [markdown]
# （尤度はとても小さな数なので、比をとって 1 と比べました。B = 40 です。）
#
# ### ステップ 3：勾配を読む
#
# 一つの対の勾配は、次のとおりです。
#
# $$
# \frac{\partial\mathcal{L}}{\partial r_\phi(x,y_w)}=-\sigma(-m),\qquad
# \frac{\partial\mathcal{L}}{\partial r_\phi(x,y_\ell)}=+\sigma(-m)
# $$
#
# $\sigma(-m)$ は、モデルが **実際とは逆の結果** （ $y_\ell\succ y_w$ ）に割り当てている確率です。順序を大きく取り違えている対では 1 に近く、もう区別できている対では 0 に近づきます。好まれた側を押し上げる力と、好まれなかった側を押し下げる力は、いつも同じ大きさです。

# %%
m = torch.linspace(-4, 4, 9).double()
r_w = m.clone().requires_grad_()
r_l = torch.zeros(9).double().requires_grad_()
(9 * reward_model_loss(r_w, r_l)).backward()  # 平均を和に戻す
claim("∂L/∂r(y_w) = −σ(−m)", r_w.grad, -torch.sigmoid(-m))
claim("∂L/∂r(y_l) = +σ(−m)", r_l.grad, torch.sigmoid(-m))

# %%
from companion.plots import COLOURS, GREY, figure

fine = torch.linspace(-5, 5, 101)
drawn, (axes,) = figure(1, 2, panel=(4.2, 2.4))
axes[0].plot(fine, -torch.nn.functional.logsigmoid(fine))
axes[0].set(title="1 対の損失 −log σ(m)（nat）", xlabel="マージン m")
axes[1].plot(fine, torch.sigmoid(-fine))
axes[1].set(title="1 対の重み σ(−m)", xlabel="マージン m")
drawn

# %% [markdown]
# データ全体ではどうなるでしょう。ある回答 $y$ について勾配を足し合わせると、きれいな形になります。
#
# $$
# \frac{\partial\mathcal{L}}{\partial r_\phi(x,y)}=\frac1B\bigl(\text{モデルが予測する } y \text{ の勝ち数}-\text{実際の } y \text{ の勝ち数}\bigr)
# $$
#
# 予測する勝ち数とは、 $y$ が出てきた対について $\widehat P(y\succ\text{相手})$ を足したものです。
# **主張** この式は、どんな点数の表でも成り立ちます。したがって、勾配が 0 になる点（最小点があれば、そこ）では、すべての回答で、予測した勝ち数が実際の勝ち数と **一致** します（モーメントの一致）。

# %%
# games[x, y, y'] = y が y' に勝った回数
games = torch.zeros(2, 15, 15).double()
one = torch.ones(()).double()
games.index_put_((of_prompt, y_w, y_l), one, accumulate=True)
actual = games.sum(-1)
predicted = ((games + games.mT) * P_hat).sum(-1)

# %%
leaf = table.clone().requires_grad_()
(gradient,) = torch.autograd.grad(data_loss(leaf, y_w, y_l), leaf)
# 同じ回答どうしの対では、勝ちと負けが打ち消し合う
claim("∂L/∂r = (予測した勝ち数 − 実際の勝ち数)/B",
      gradient, (predicted - actual) / 40)

# %% [markdown]
# ### ステップ 4：分かるのは、プロンプトごとの差だけ
#
# 損失には、同じプロンプトの 2 つの点数の差しか出てきません。ですから、 **プロンプトごとに** 別々の定数 $c(x)$ を足しても、損失は変わりません。
# 報酬モデルの点数「3.2」に、それだけで意味はありません。違うプロンプトの点数を比べることにも、式 (4.8) だけからは意味がありません。

# %%
shifted = table + torch.tensor([[3.0], [-7.0]]).double()
claim("r + c(x) でも L は同じ",
      data_loss(shifted, y_w, y_l), data_loss(table, y_w, y_l))

# %% [markdown]
# ### ステップ 5：データが無限にあれば、真の報酬が取り戻せる
#
# 2 つの回答が確率 $\mu(y,y'\mid x)$ で引かれ、ラベルが真の報酬の Bradley–Terry モデルに従うとします。引く順番には意味がないので $\mu(y,y')=\mu(y',y)$ とすると、期待値は有限の和です（ $y$ が勝つのは、先に引かれたときと後に引かれたときの 2 通りあるので、2 が付きます）。
#
# $$
# \mathcal{L}(\widehat r)=-\sum_{y,y'}2\,\mu(y,y'\mid x)\,P(y\succ y'\mid x)\log\widehat P(y\succ y'\mid x)
# $$
#

# %%
from torch.nn.functional import logsigmoid

mu = ref_logps.exp()[:, :, None] * ref_logps.exp()[:, None, :]


def margins_of(table):
    return table[..., :, None] - table[..., None, :]


def population_loss(table, mu):
    logs = logsigmoid(margins_of(table))
    return -(2 * mu * P * logs).sum((-2, -1))  # プロンプトごと


# %% [markdown]
# **主張** 損失の超過分は、真の選好の確率から見た予測の KL ダイバージェンスの平均です。
#
# $$
# \mathcal{L}(\widehat r)-\mathcal{L}(r)=\mathbb{E}_{\mu}\bigl[D_{\mathrm{KL}}[P\|\widehat P]\bigr]\ge0
# $$
#
# ですから、真の報酬は損失の最小点です（表が $r$ を表せること、 $0<P<1$ であること、つまり真の報酬が有限であることを使っています）。ランダムな 200 個の表で確かめます。

# %%
def label_kl(table):
    truth, ours = margins_of(rewards), margins_of(table)
    win = P * (logsigmoid(truth) - logsigmoid(ours))
    lose = (1 - P) * (logsigmoid(-truth) - logsigmoid(-ours))
    return (mu * (win + lose)).sum((-2, -1))


tables = world.random_rewards(g, 200)
excess = population_loss(tables, mu) - population_loss(rewards, mu)
claim("L(r̂) − L(r) = E_μ[KL(P‖P̂)]", excess, label_kl(tables))
check("200 個の超過分は正", excess.min() > 0, f"最小 {excess.min():.4f}")

# %% [markdown]
# ### ステップ 6：どこまで決まるかは、比較のつながりで決まる
#
# 最小点は $r$ のほかにもあります（ステップ 4）。では、ちょうどどれだけあるのでしょうか。損失は点数について凸で、2 階微分（ヘッセ行列）は
#
# $$
# H=\sum_{\{y,y'\}}2\mu(y,y')\,\widehat P(1-\widehat P)\,(e_y-e_{y'})(e_y-e_{y'})^\top
# $$
#
# です（ $e_y$ は $y$ の場所だけ 1 のベクトル）。これは、回答を頂点、比べられる対を辺とする **比較グラフ** の重み付きラプラシアンです。その固有値 0 の数は、どんな点数の表でも、グラフの連結成分の数に等しいことが知られています（ $0<\widehat P<1$ なので、辺の重みは正です）。
#
# **主張** $0<P<1$ で、表形式なら、最小点は「真の報酬＋ **連結成分ごとの** 定数」だけです。
#
# 全部の回答がつながっている場合と、最初の文字が同じ回答どうししか比べない場合（a 組 7 つ、b 組 7 つ、 `$` 1 つの 3 成分）を比べます。

# %%
first_letter = world.tokens[:, 0]  # a は 0、b は 1、$ は 2
same_first = first_letter[:, None] == first_letter[None, :]
mu_split = mu * same_first / (mu * same_first).sum((-2, -1), keepdim=True)
designs = {"全部つながる": (mu, 1), "最初の文字ごと": (mu_split, 3)}

# %%
for name, (design, components) in designs.items():
    at_truth = rewards.clone().requires_grad_()
    loss = population_loss(at_truth, design).sum()
    (gradient,) = torch.autograd.grad(loss, at_truth)
    claim(f"{name}: ∇L(r) = 0", gradient, torch.zeros(()), tol=1e-12)

    hessian = torch.func.hessian(
        lambda row, design=design: population_loss(row, design)[0]
    )(rewards[:1])[0, :, 0, :]
    zeros = (torch.linalg.eigvalsh(hessian) < 1e-12).sum()
    check(f"{name}: 1 つ目のプロンプトで、固有値 0 は {components} 個",
          zeros == components)

# %% [markdown]
# つながっていない成分の間では、定数を別々に足せます。損失は同じでも、どの回答が一番よいかが変わってしまいます。

# %%
moved = rewards + torch.tensor([5.0, -5.0, 0.0]).double()[first_letter]
claim("成分ごとの定数を足しても L は同じ",
      population_loss(moved, mu_split), population_loss(rewards, mu_split))
first, other = (world.responses[t[0].argmax()] for t in (rewards, moved))
check("一番よい回答は入れ替わる", first != other, f"{first} → {other}")

# %% [markdown]
# ### ステップ 7：ラベルに雑音がないと、最小点がない
#
# $0<P<1$ という条件は、飾りではありません。よい回答が **必ず** 勝つなら、どの対でも、真の順序を保ったまま差を広げるほど損失は減ります。 $c\,r$ の $c$ を大きくしていきましょう。

# %%
def sure_loss(table):  # 報酬の高いほうが必ず好まれる（引き分けは除く）
    wins = mu * (margins_of(rewards) > 0)
    return -(wins * logsigmoid(margins_of(table))).sum((-2, -1))


c = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]).double()
losses = sure_loss(c[:, None, None] * rewards)[:, 0]

# %%
print("c   ", *[f"{v:9.0f}" for v in c])
print("損失", *[f"{v:9.6f}" for v in losses])
check("下がりつづけるが 0 には届かない",
      (losses.diff() < 0).all() and losses[-1] > 0)

# %% [markdown]
# 最小点がないことは、どこでも勾配が 0 にならないことから分かります。どんな表 $\widehat r$ でも、真の報酬の方向への微分は
# $-\sum(\text{対の重み})\,\sigma(-m)\,(r(y_w)-r(y_\ell))$ で、すべての項が負だからです。200 個の表で確かめます。

# %%
_, slopes = torch.func.jvp(
    sure_loss, (tables,), (rewards.expand_as(tables).contiguous(),)
)
check("どの表でも、r の方向に損失は下がる", slopes.max() < 0,
      f"最大の傾き {slopes.max():.2e}")

# %% [markdown]
# データが **有限** なら、真の確率が 0 と 1 の間でも同じことが起こります。最小点があるのは、どの回答からも、勝ちをたどって（同じ成分の）ほかのすべての回答に行けるとき、そしてそのときだけです（Ford 1957）。
# 一度は勝ち、一度も負けていない回答があれば、その点数はどこまでも上がります。実際の学習では、更新を途中でやめることや、正則化、モデルのパラメータの共有が、それを抑えています。
#
# ### ステップ 8：順位をまとめて付けたとき
#
# 実際の収集では、K 個の回答に一度に順位を付けてもらい、K(K−1)/2 個の対に分けて式 (4.8) に入れることがあります。これは、順位の最尤推定と同じでしょうか。
#
# 順位の標準的なモデルは Plackett–Luce です。残っている回答の中から、一番よいものを $e^{r}$ に比例する確率で選ぶことを繰り返します。K = 3 なら
#
# $$
# P_{\mathrm{PL}}(1\succ2\succ3)=\frac{e^{r_1}}{e^{r_1}+e^{r_2}+e^{r_3}}\cdot\frac{e^{r_2}}{e^{r_2}+e^{r_3}}
# $$
#
# です。報酬 $r=(1,0,-1)$ で、順位 $1\succ2\succ3$ の負の対数尤度と、対に分けた損失の和を比べます。

# %%
from itertools import permutations

rankings = list(permutations(range(3)))  # よい順に並べた 6 通り


def plackett_luce(r):
    """順位ごとの負の対数尤度 (6,)。"""
    return torch.stack([
        sum(r[list(o[k:])].logsumexp(0) - r[o[k]] for k in range(2))
        for o in rankings
    ])


# %%
def pairwise(r):
    """順位ごとの、3 つの対の損失 (4.8) の和 (6,)。"""
    return torch.stack([
        -sum(logsigmoid(r[o[i]] - r[o[j]])
             for i in range(3) for j in range(i + 1, 3))
        for o in rankings
    ])


r_3 = torch.tensor([1.0, 0.0, -1.0]).double()
claim("順位 1≻2≻3 の負の対数尤度", plackett_luce(r_3)[0], 0.7209, tol=5e-5)
claim("3 つの対に分けた損失の和", pairwise(r_3)[0], 0.7535, tol=5e-5)

# %% [markdown]
# 2 つは違います。対に分けた損失を「確率」に戻しても、6 通りの順位の和は 1 になりません。3 つの対を独立に比べると、 $1\succ2\succ3\succ1$ のような **一巡** にも確率が割り当てられるからです。足りない分は、ちょうど 2 つの一巡の確率です。

# %%
P_3 = bradley_terry(r_3[None])[0]
cycles = P_3[0, 1] * P_3[1, 2] * P_3[2, 0]
cycles = cycles + P_3[1, 0] * P_3[2, 1] * P_3[0, 2]
probs = (-plackett_luce(r_3)).exp()  # 順位の本当の確率
claim("Plackett–Luce の確率の和は 1", probs.sum(), 1.0)
claim("対に分けると 1 − 一巡の確率",
      (-pairwise(r_3)).exp().sum(), 1 - cycles)

# %% [markdown]
# **残るもの** Plackett–Luce モデルでは、2 つの回答だけに注目すれば、その順序は Bradley–Terry モデルに従います。対ごとの周辺分布が正しいので、対に分けた損失も、真の $r$ で期待値が最小になります（どちらも $r$ について凸で、定数を足す自由を除いて、最小点はそこだけです）。このように、周辺の対数尤度を足し合わせたものを **複合尤度** （composite likelihood）といいます。

# %%
ahead = torch.tensor([
    [[o.index(i) < o.index(j) for j in range(3)] for i in range(3)]
    for o in rankings
]).double()
marginal = torch.einsum("o,oij->ij", probs, ahead)
off = ~torch.eye(3, dtype=torch.bool)
claim("P_PL(i が j より上) = σ(r_i − r_j)", marginal[off], P_3[off])

# %%
both = {"Plackett–Luce": plackett_luce, "対に分けた損失": pairwise}
hessians, covariances = {}, {}
for name, loss_of in both.items():
    scores_3 = torch.func.jacrev(loss_of)(r_3)  # (順位, 報酬)
    claim(f"{name}: 真の r で勾配の期待値は 0",
          probs @ scores_3, torch.zeros(3), tol=1e-12)
    covariances[name] = torch.einsum(
        "o,oi,oj->ij", probs, scores_3, scores_3
    )
    second = torch.func.hessian(loss_of)(r_3)
    hessians[name] = torch.einsum("o,oij->ij", probs, second)
    zeros = (torch.linalg.eigvalsh(hessians[name]) < 1e-12).sum()
    check(f"{name}: 最小点は定数の自由を除いて一つ", zeros == 1,
          "固有値 0 は 1 個")

# %% [markdown]
# **残らないもの** 1 つの順位から来た 3 つの対は、独立ではありません。独立だとみなして標準誤差を計算すると、データを多く見積もります。
# モデルが正しく、真の $r$ で測るなら、対数尤度では、1 つの順位についての勾配の分散 $V$ とヘッセ行列の期待値 $H$ は等しくなります（情報行列の等式）。複合尤度では成り立ちません。順位を $n$ 個集めたとき、点数の差の推定の分散は（点数の和を 0 にそろえれば）、 $n$ が大きければ $H^{+}VH^{+}/n$ に近づきます（ $^{+}$ は擬似逆行列）。

# %%
claim("Plackett–Luce: V = H",
      covariances["Plackett–Luce"], hessians["Plackett–Luce"])
off_by = (covariances["対に分けた損失"] - hessians["対に分けた損失"]).abs()
check("対に分けた損失: V ≠ H", off_by.max() > 0.05,
      f"最大差 {off_by.max():.3f}")

# %%
contrast = torch.tensor([1.0, 0.0, -1.0]).double()  # r₁ − r₃ の推定


def variance(H, V):
    return (contrast @ H.pinverse() @ V @ H.pinverse() @ contrast).item()


H = hessians["対に分けた損失"]
honest = variance(H, covariances["対に分けた損失"])
naive = variance(H, H)
ideal = variance(*[hessians["Plackett–Luce"]] * 2)
print(f"r₁ − r₃ の分散 × n: 最尤 {ideal:.3f}、対に分けて {honest:.3f}、"
      f"独立とみなすと {naive:.3f}")
check("独立とみなすと小さく見える", naive < ideal <= honest,
      f"本当の値の {naive / honest:.2f} 倍")
check("対に分けた推定は、最尤推定とあまり変わらない",
      honest < 1.1 * ideal, f"分散は {honest / ideal:.3f} 倍")

# %% [markdown]
# この例では、対に分けた推定そのものの分散は、最尤推定より少し大きいだけです。気をつけるのは、対の数を「独立なデータの数」と数えてしまうことのほうです。同じ順位から来た対を訓練と評価に分けて入れるのも、同じ理由で避けます。
#
# ## 実装
#
# 式 (4.8) を、そのまま NumPy で書きます。

# %%
import numpy as np


def reward_model_loss_numpy(rewards_chosen, rewards_rejected):
    total = 0.0
    for i in range(len(rewards_chosen)):
        margin = rewards_chosen[i] - rewards_rejected[i]
        total += np.logaddexp(0.0, -margin)  # −log σ(m)、桁あふれなし
    return total / len(rewards_chosen)


# %% [markdown]
# パッケージの `reward_model_loss` は、同じ式をベクトルで書いた PyTorch 版です。説明と入力の検査のあと、最後の 3 行が式です。

# %%
import inspect

print(inspect.getsource(reward_model_loss))

# %%
pair_scores = 3 * torch.randn(2, 8, generator=g, dtype=torch.float64)
claim("NumPy = PyTorch", reward_model_loss_numpy(*pair_scores.numpy()),
      reward_model_loss(*pair_scores), tol=1e-12)

# %%
leaves = [row.clone().requires_grad_() for row in pair_scores]
check("自動微分の勾配 = 数値微分の勾配",
      torch.autograd.gradcheck(reward_model_loss, leaves))

# %% [markdown]
# 手計算とも合わせておきましょう。マージンが 0、1、−1、−200 のときの値です。−200 では $\sigma(m)$ が float32 で 0 になるので、 $\sigma$ と $\log$ を別々に計算すると損失が無限大になります。

# %%
margins = torch.tensor([0.0, 1.0, -1.0, -200.0], requires_grad=True)
values = [reward_model_loss(m, torch.zeros(1)) for m in margins.split(1)]
claim("−log σ(m)", torch.stack(values),
      [0.693147, 0.313262, 1.313262, 200.0], tol=1e-6)

# %%
(gradient,) = torch.autograd.grad(sum(values), margins)
check("勾配はどれも有限", gradient.isfinite().all(),
      " ".join(f"{v:.3f}" for v in gradient))
check("別々に計算すると無限大", torch.sigmoid(margins[3]).log().isinf())

# %% [markdown]
# ## TRL との照合
#
# ### 同じモデル、同じデータで、損失と勾配を比べる
#
# TRL の報酬モデルは、言語モデルの最後の層に、語彙の代わりに **出力が 1 つ** の線形層（ `score` という名前です）を載せたものです。transformers では、出力が 1 つの系列分類モデルがそれに当たります。
# SFT 済みの小さなモデルから作ります。線形層は、乱数で初期化されます。

# %%
from transformers import AutoModelForSequenceClassification

from companion.lm import checkpoint, load

_, tokenizer = load("prime-sums")
torch.manual_seed(0)
reward_model = AutoModelForSequenceClassification.from_pretrained(
    str(checkpoint("prime-sums")), num_labels=1, dtype=torch.float64
)
print(reward_model.score)

# %%
from companion.tasks import PRIME_SUMS, preferences

pairs = preferences(PRIME_SUMS, 8, seed=0)
pairs.to_pandas().head(4)

# %% [markdown]
# `preference_batch` は、TRL のコレータで対をバッチにします。前半の 8 行が好まれた回答、後半の 8 行が好まれなかった回答です。

# %%
from companion.oracle import preference_batch, trl_reward_model


def token_ids(texts, end=""):
    return tokenizer([text + end for text in texts])["input_ids"]


def collate(pad):
    end = tokenizer.eos_token
    rows = [token_ids(pairs["prompt"])]
    rows += [token_ids(pairs[y], end) for y in ("chosen", "rejected")]
    return preference_batch(*rows, pad_token_id=pad)


# %%
batch = collate(pad=tokenizer.pad_token_id)
inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
scores = reward_model(**inputs).logits
check("1 行に 1 つの点数（語彙のロジットではない）",
      scores.shape == (16, 1), str(tuple(scores.shape)))

# %% [markdown]
# `trl_reward_model` は、TRL のトレーナーの `compute_loss` をそのまま呼び、損失と、モデルの全パラメータについての勾配を返します。こちらは、同じモデルの点数を `reward_model_loss` に渡します。

# %%
theirs = trl_reward_model(reward_model, batch, tokenizer)
rewards_chosen, rewards_rejected = scores.squeeze(-1).chunk(2)
ours = reward_model_loss(rewards_chosen, rewards_rejected)
names, parameters = zip(*reward_model.named_parameters(), strict=True)
gradients = torch.autograd.grad(ours, parameters, retain_graph=True)

# %%
gaps = [
    (gradient - theirs.gradients[name]).abs().max().item()
    for name, gradient in zip(names, gradients, strict=True)
]
claim("損失: PyTorch = TRL", ours, theirs.loss, tol=1e-12)
check("全パラメータの勾配が一致", max(gaps) <= 1e-12,
      f"{len(gaps)} 個のテンソルで最大差 {max(gaps):.0e}")

# %%
import pandas as pd

by_numpy = reward_model_loss_numpy(*scores.detach().view(2, 8).numpy())
claim("損失: NumPy = TRL", by_numpy, theirs.loss, tol=1e-12)
three = {"NumPy": by_numpy, "torch": ours.item(), "TRL": theirs.loss.item()}
widest = max(three.values()) - min(three.values())
three = {name: f"{value:.12f}" for name, value in three.items()}
pd.DataFrame([three | {"最大差": f"{widest:.0e}"}], index=["式 (4.8)"])

# %% [markdown]
# ### サポートページのコードを CPU で動かす
#
# サポートページの `RewardTrainer` の例を、ノート PC の CPU で動かします。

# %%
import tempfile

from datasets import Dataset
from trl import RewardConfig, RewardTrainer

preference_dataset = Dataset.from_list([{
    "prompt": "日本の首都は？",
    "chosen": "東京です。",
    "rejected": "札幌です。",
}])

# %%
from companion.training import train

output_dir = tempfile.mkdtemp()
trainer = RewardTrainer(
    model=str(checkpoint("prime-sums")),  # 変更 1
    processing_class=tokenizer,
    args=RewardConfig(
        output_dir=output_dir,  # 変更 2
        bf16=torch.cuda.is_available(),  # 変更 3
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,  # 表に出すために、毎回記録します
    ),
    train_dataset=preference_dataset,
)
history = train(trainer)  # trainer.train() を呼び、記録を表にします
trainer.save_model(output_dir)
history[["step", "loss", "accuracy", "margin"]]

# %% [markdown]
# 1. **モデルは、フォルダの場所（か、 `num_labels=1` の系列分類モデル）で渡します。** SFT 済みの言語モデルをそのまま渡すと、下のエラーになります。場所で渡せば、TRL が `num_labels=1` の系列分類モデルとして読み込みます。
# 2. **出力先は、一時フォルダにします。** 例の `outputs/reward-model` でも動きますが、ノートブックの隣にフォルダが増えます。
# 3. **`bf16` と、どこで動かすかを明示します。** 何も書かないと TRL は bf16 を使おうとし、CUDA のない多くのマシンではエラーになります。
#
# （ノートブックの `train` は、 `trainer.train()` を呼んで進捗バーを表示し、学習の記録を表にして返す関数です。）

# %%
def error_of(build):
    try:
        build()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:75]}…"
    return "エラーになりません"


folder = tempfile.mkdtemp()
on_cpu = dict(output_dir=folder, use_cpu=True, bf16=False)


def trainer_of(model, dataset=preference_dataset, **config):
    return RewardTrainer(
        model, args=RewardConfig(**on_cpu, **config),
        processing_class=tokenizer, train_dataset=dataset,
    )


# %%
sft_error = error_of(lambda: trainer_of(load("prime-sums")[0]))
check("言語モデルをそのまま渡すと", "num_labels=2" in sft_error, sft_error)

# %%
bf16_error = error_of(lambda: RewardConfig(output_dir=folder))
if "bf16" in bf16_error:
    print("bf16 を書かない:", bf16_error)
else:
    print("SKIPPED: このマシンでは、bf16 を書かなくても動きます")

# %% [markdown]
# ### 式と TRL の違い
#
# 損失そのものは、見てきたとおり式と一致します。違いは、「どこの点数を読むか」と「どのデータを使うか」にあります。一つずつ、数で確かめましょう。
#
# **点数は、EOS のところで読みます。** TRL は、回答の終わりに EOS がなければ付け足し、最後の（パディングでない）トークンの点数を使います。点数を付けるときに EOS を忘れると、学習のときとは違う場所を読むことになります。
# `score` は、プロンプトと回答の文字列から点数を計算する、パッケージの関数です。

# %%
from companion.lm import score

differences = {}
example = dict(prompts=["20未満の素数の合計は？"], completions=["77"])
with_eos = score(reward_model, tokenizer, **example)
without_eos = score(reward_model, tokenizer, **example, eos=False)
differences["EOS を付ける"] = (
    f"点数 {without_eos.item():.4f} → {with_eos.item():.4f}"
)

# %%
check("EOS のあるなしで点数が違う",
      abs(with_eos - without_eos).item() > 0.01, differences["EOS を付ける"])

# %% [markdown]
# **パディングと EOS が同じだと、点数を 1 つ手前で読みます。** transformers の系列分類モデルは、「パディングでない最後のトークン」を、位置ではなく **値** で探します。
# パディングが EOS と同じトークンだと、回答の最後の EOS もパディングとみなされ、その 1 つ手前の点数になります。トークナイザにパディングがないと、TRL は EOS をパディングに使うので、珍しい話ではありません。

# %%
_, same_id = load("prime-sums")
same_id.pad_token = same_id.eos_token
pad_is_eos = collate(pad=same_id.pad_token_id)
early = trl_reward_model(reward_model, pad_is_eos, same_id).loss
unended = [
    score(reward_model, tokenizer, pairs["prompt"], pairs[y], eos=False)
    for y in ("chosen", "rejected")
]
claim("pad = eos の損失 = EOS を付けないときの損失",
      early, reward_model_loss(*unended), tol=1e-6)

# %%
differences["パディング = EOS"] = (
    f"損失 {theirs.loss:.4f} が {early:.4f} に"
)
check("正しい損失とは違う", abs(early - theirs.loss) > 1e-3,
      differences["パディング = EOS"])

# %% [markdown]
# 学習でも採点でも同じように 1 つ手前を読むなら、つじつまは合います。困るのは、片方だけが違うときです。
# `score` は、最後のトークンを値ではなく注意マスクで見つけるので、パディングが何であっても同じ点数になります。
#
# **左右のパディング** 同じ回答の点数は、単独でも、左や右にパディングがあっても、（丸めを除いて）同じです。ただし左のパディングでは、注意マスクを渡すことが条件です。

# %%
ids = token_ids(["20未満の素数の合計は？77"], tokenizer.eos_token)
ids, real = torch.tensor(ids), torch.ones(1, len(ids[0]), dtype=torch.long)
pad_3 = torch.full((1, 3), tokenizer.pad_token_id)
no_3 = torch.zeros(1, 3, dtype=torch.long)


def score_of_ids(*pieces, mask=None):
    with torch.no_grad():
        return reward_model(
            input_ids=torch.cat(pieces, 1),
            attention_mask=None if mask is None else torch.cat(mask, 1),
        ).logits.item()


# %%
alone = score_of_ids(ids)
right = score_of_ids(ids, pad_3, mask=(real, no_3))
left = score_of_ids(pad_3, ids, mask=(no_3, real))
no_mask = score_of_ids(pad_3, ids)
claim("右のパディング", right, alone, tol=1e-12)
claim("左のパディング", left, alone, tol=1e-5)
check("左で、マスクを渡さないと違う", abs(no_mask - alone) > 1e-4,
      f"差 {abs(no_mask - alone):.4f}")

# %%
differences["左のパディング"] = (
    f"マスクあり {abs(left - alone):.0e}、なし {abs(no_mask - alone):.4f}"
)

# %% [markdown]
# （左のパディングでごくわずかにずれるのは、transformers が位置を左端から数えるためです。Qwen2 の位置の埋め込みは位置の **差** だけで決まるので、丸め誤差しか残りません。位置そのものを足すモデルでは、この保証はありません。）
#
# **長すぎる対は、捨てられます。** DPO（4.5.1 節）では回答の後ろが切られますが、報酬モデルでは、どちらかの回答（プロンプトと EOS を含む）が `max_length` （既定値 1024）を超えた対は、データセットから消えます。

# %%
three_rows = Dataset.from_list([
    dict(prompt=prompt, chosen="77", rejected="78")
    for prompt in ("1+", "1234+", "123456789+")
])

# %%
kept = len(trainer_of(
    str(checkpoint("prime-sums")), three_rows, max_length=8
).train_dataset)
check("max_length=8 で 1 対が消える", kept == 2, f"3 対中 {kept} 対が残る")
differences["max_length=8"] = f"3 対中 {kept} 対が残る"

# %%
def all_dropped():
    path = str(checkpoint("prime-sums"))
    trainer_of(path, three_rows, max_length=4).train()


empty_error = error_of(all_dropped)
check("0 対のとき、エラーが出るのは学習を始めてから",
      "num_samples" in empty_error, empty_error)

# %% [markdown]
# **引き分けは、不正解として数えられます。** TRL が記録する `accuracy` は、好まれた回答の点数のほうが **大きい** 割合です。点数を常に 0 にしたモデルでは、0.5 ではなく 0 になります。

# %%
import copy

silent = copy.deepcopy(reward_model)
torch.nn.init.zeros_(silent.score.weight)
tie = trl_reward_model(silent, batch, tokenizer)
claim("損失は log 2", tie.loss, np.log(2), tol=1e-12)
check("正解率は 0", tie.metrics["accuracy"] == 0)
differences["引き分け"] = f"正解率 {tie.metrics['accuracy']:.1f}"

# %% [markdown]
# **点数を 0 の近くに保つ項があります。** ステップ 4 のとおり、損失は点数の原点を決めません。 `center_rewards_coefficient` （既定値は `None`、つまりなし）を指定すると、対の点数の和の 2 乗の平均に、この係数を掛けたものが損失に加わり、原点が決まります（比べる回答が 3 つ以上あれば、点数の差も少し縮みます）。

# %%
centred = trl_reward_model(
    reward_model, batch, tokenizer, center_rewards_coefficient=0.01
).loss
penalty = 0.01 * ((rewards_chosen + rewards_rejected) ** 2).mean()
claim("(4.8) + 0.01·E[(r_w + r_l)²] = TRL", ours + penalty, centred,
      tol=1e-12)
differences["center_rewards_coefficient=0.01"] = (
    f"損失 {ours.item():.4f} → {centred.item():.4f}"
)

# %% [markdown]
# （データに `margin` という列があると（記号の表の、記録される `margin` とは別のものです）、TRL は $-\log\sigma(m-\text{margin})$ を使います。対ごとに「これだけは差があるはず」という値を渡すための機能で、式 (4.8) にはありません。）
#
# **既定値** も見ておきます。

# %%
defaults = RewardConfig(**on_cpu)
for name in ("learning_rate", "max_length", "logging_steps",
             "num_train_epochs", "per_device_train_batch_size",
             "gradient_checkpointing", "center_rewards_coefficient"):
    differences[f"既定値 {name}"] = str(getattr(defaults, name))
pd.DataFrame(differences.items(), columns=["式と TRL の違い", "測った値"])

# %% [markdown]
# ## 学習
#
# 小さな報酬モデルを、TRL の `RewardTrainer` で学習させます。課題は 6 桁の数字の並べ替え（`780667>` → `066778`）です。
# 出発点は、4 割が正解、残りがもっともらしい間違い、という手本で学んだモデルです（SFT）。その最後に、乱数で初期化した、出力が 1 つの線形層を載せます。
#
# 選好データセットは、手本と同じ分布から引いた、互いに異なる 2 つの回答を、真の報酬の Bradley–Terry モデルで比べたものです。真の報酬は、合っている桁の数に、全部合っていれば 2 を足したもの（6 桁の数字でない回答は 0）で、報酬モデルには見せません。
# 評価には、学習に出てこない並びの問題から、同じように作った 1,000 対を使います。

# %%
from dataclasses import asdict, replace

from companion.tasks import SORTING
from companion.training import preset

rm_preset = preset("reward_model")
train_pairs = preferences(SORTING, rm_preset.examples, seed=0)
held_out = replace(SORTING, train_prompts=SORTING.test_prompts)
test_pairs = preferences(held_out, 1_000, seed=1_000)
test_pairs.to_pandas().head(3)

# %%
def true_rewards(side):
    columns = test_pairs["prompt"], test_pairs[side]
    return torch.tensor(
        [SORTING.reward(x, y) for x, y in zip(*columns, strict=True)]
    )


true_sides = torch.stack([true_rewards(y) for y in ("chosen", "rejected")])
true_margins = true_sides[0] - true_sides[1]
tied = (true_margins == 0).float().mean()
upset = (true_margins < 0).float().mean()
print(f"真の報酬が同じ対 {tied:.1%}、低いほうが好まれた対 {upset:.1%}")

# %% [markdown]
# ラベルに雑音があるので、真の報酬を知っていても、ラベルを全部は当てられません。どちらが好まれるかを知るのに一番よい予測（報酬の高いほうを選ぶ）の正解率の期待値は、 $\sigma(\lvert r-r'\rvert)$ の平均です。

# %%
ceiling = torch.sigmoid(true_margins.abs()).mean().item()
print(f"ラベルの正解率の上限（期待値） {ceiling:.3f}")
pd.DataFrame([asdict(rm_preset)]).drop(columns="beta")  # KL の項はない

# %% [markdown]
# 学習は、パッケージの関数にまとめてあります。4.4.3 節（PPO）でも、同じ関数で報酬モデルを作ります。中身は、上で見た `RewardTrainer` の呼び出しです。

# %%
from companion.training import new_reward_model, train_reward_model

for function in (new_reward_model, train_reward_model):
    code = inspect.getsource(function)
    print(code.split('"""')[0].rstrip() + code.split('"""')[2])

# %%
untrained = new_reward_model("sorting")
sorting_rm, rm_history = train_reward_model("sorting", train_pairs)

# %%
from companion.plots import curves

curves(rm_history, {
    "損失": "loss",
    "ラベルの正解率（学習データ）": "accuracy",
    "マージンの平均": "margin",
    "点数": {"最大": "max_reward", "平均": "mean_reward",
             "最小": "min_reward"},
})

# %% [markdown]
# 損失は log 2 ≈ 0.69 の近くから下がり、正解率は 0.5 の近くから上がります。線が上下するのは、数個のミニバッチだけの値だからです。点数の平均は、0 のあたりにとどまるとは限りません。原点を決めるものが、損失にないからです（ステップ 4）。
#
# 学習に使っていない対で測ります。「真の順序の正解率」は、真の報酬に差がある対で、その順序を当てた割合です。

# %%
def evaluate(model):
    """対ごとの点数 (2, 対) と、測った値。"""
    sides = torch.stack([
        score(model, tokenizer, test_pairs["prompt"], test_pairs[y])
        for y in ("chosen", "rejected")
    ])
    margins = sides[0] - sides[1]
    differ = true_margins != 0
    right_order = (margins > 0) == (true_margins > 0)
    return sides, {
        "ラベルの正解率": (margins > 0).float().mean().item(),
        "真の順序の正解率": right_order[differ].float().mean().item(),
        "マージンの相関": np.corrcoef(margins, true_margins)[0, 1],
        "点数の相関": np.corrcoef(
            sides.flatten(), true_sides.flatten()
        )[0, 1],
    }


# %%
from companion.plots import before_after

_, before = evaluate(untrained)
sides, after = evaluate(sorting_rm)
before_after(
    {name: (before[name], after[name]) for name in after},
    title="学習していない 1,000 対で",
)

# %%
was, now = (row["ラベルの正解率"] for row in (before, after))
check("ラベルの正解率が上がる（上限には届かない）",
      was + 0.1 < now < ceiling,
      f"{was:.3f} → {now:.3f}（上限 {ceiling:.3f}）")

# %%
check("真の順序の正解率は 0.8 以上", after["真の順序の正解率"] > 0.8,
      f"{after['真の順序の正解率']:.3f}")
check("真の報酬との相関（マージン）", after["マージンの相関"] > 0.35,
      f"{after['マージンの相関']:.3f}")

# %% [markdown]
# 点数どうしの相関は、マージンどうしの相関より小さくなりました。点数そのものには、プロンプトごとの定数という、損失が決めない成分が混ざるためだと考えられます（ステップ 4）。
#
# 次は **較正** （calibration）です。対の並び順をでたらめにして（はじめのほうが好まれたとは限らないようにして）、予測した確率 $\widehat P=\sigma(m)$ で対を 8 つの組に分け、組ごとに、実際に好まれた割合と、真の確率の平均を描きます。

# %%
flip = torch.rand(1_000, generator=torch.Generator().manual_seed(0)) < 0.5
sign = torch.where(flip, -1.0, 1.0)
predicted_p = torch.sigmoid(sign * (sides[0] - sides[1]))
true_p = torch.sigmoid(sign * true_margins)
label = (~flip).float()  # 並べ替えた後で、はじめの回答が好まれたか

# %%
groups = torch.stack([
    torch.stack([v[part].mean() for v in (predicted_p, label, true_p)])
    for part in predicted_p.argsort().chunk(8)
])

# %%
drawn, ((ax,),) = figure(1, 1, panel=(4.6, 3.8))
ax.axline((0, 0), slope=1, color=GREY, linestyle="--", linewidth=1)
ax.plot(groups[:, 0], groups[:, 1], "o-", label="好まれた割合")
ax.plot(groups[:, 0], groups[:, 2], "s-", color=COLOURS[2],
        label="真の確率の平均")
ax.set(xlabel="予測した確率", ylabel="実際", xlim=(0, 1), ylim=(0, 1),
       title="較正曲線（125 対ずつの組）")
ax.legend(loc="upper left")
drawn

# %%
off_line = (groups[:, 0] - groups[:, 1]).abs().mean().item()
per_pair = (predicted_p - true_p).abs().mean().item()
print(f"組ごとの、予測と割合の差の平均 {off_line:.3f}")
print(f"対ごとの、予測と真の確率の差の平均 {per_pair:.3f}")

# %%
check("組の平均では合っていても、対ごとの予測は合っていない",
      off_line < 0.15 and per_pair > off_line)

# %% [markdown]
# 組の平均で見るとだいたい合っていますが、一つ一つの対の予測は、真の確率からもっと離れています。較正は「予測の平均が合うか」しか見ていません。
#
# 一つの問題について、いくつかの回答の点数を見てみましょう。

# %%
prompt = SORTING.test_prompts[0]
answer = SORTING.answer(prompt)
tries = [answer, answer[:5] + "0", "9" + answer[1:], answer[::-1],
         prompt[:6], "000000", answer + "0", answer[:3]]
pd.DataFrame({
    "プロンプト": prompt,
    "回答": tries,
    "真の報酬": [SORTING.reward(prompt, y) for y in tries],
    "点数": score(
        sorting_rm, tokenizer, [prompt] * len(tries), tries
    ).numpy().round(2),
})

# %% [markdown]
# 学習データに出てくるのは、正解か、数字をいくつか取り違えた 6 桁の回答だけです。桁の数が違う回答や、まったく並べ替えていない回答は、まず比べられていないので、点数は何であってもおかしくありません。実際、3 桁しかない回答の点数が、正解より高くなっています。

# %% [markdown]
# ## 実験
#
# 報酬モデルは、真の報酬の **代わり** （プロキシ）です。その点数を最大にしようとすると、途中までは真の報酬も上がり、やがて下がり始めることがあります。これを過剰最適化といいます。
#
# ここからは、もう一度「全部を数え上げられる世界」に戻ります。8 つの乱数の種（シード）を一度に計算します。図の線は 8 シードの中央値、帯は最小値から最大値までです。
#
# ### 実験 1：プロキシで方策を傾けると
#
# 文字は 3 つ、回答は最長 3 トークンで 40 通り、プロンプトは 32 個です。参照方策は、でたらめな方策を真の報酬で少し傾けたもの（SFT 済みの方策のように、よい回答をすでに多めに出す方策）とします。
# プロンプトごとに、参照方策から 100 対（比較のために、1,000 対の場合も）を引いて真の報酬でラベルを付け、表形式の報酬モデルを `reward_model_loss` で学習します。初期値はすべて 0 で、更新は Adam で 200 回です。

# %%
from companion.exact import expect, kl, tilt

big = World(prompts=32, letters=3, max_length=3)
g = torch.Generator().manual_seed(1)
raw_logps = big.log_probs(big.random_logits(g, 8))
gold = big.random_rewards(g, 8)  # 真の報酬 (シード, プロンプト, 回答)
start_logps = tilt(raw_logps, gold)  # 参照方策


# %%
def fit_proxy(pairs_per_prompt, steps=200):
    own = torch.Generator().manual_seed(0)  # 何度呼んでも同じデータ
    y_w, y_l = sample_preferences(
        start_logps.exp(), gold, pairs_per_prompt, own
    )
    proxy = torch.zeros_like(gold).requires_grad_()
    optimizer = torch.optim.Adam([proxy], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        data_loss(proxy, y_w, y_l).backward()
        optimizer.step()
    return proxy.detach(), torch.cat([y_w, y_l], -1)


from torch.nn.functional import one_hot

proxies, counts = {}, {}
for n in (100, 1_000):
    proxies[n], compared = fit_proxy(n)
    counts[n] = one_hot(compared, 40).sum(-2)  # 比べられた回数
    never = (counts[n] == 0).double().mean()
    print(f"{n:,} 対: 一度も比べられなかった回答 {never:.1%}")

# %% [markdown]
# 4.4.3 節の目的関数 (4.9)、つまり $\mathbb{E}[r_\phi]-\beta D_{\mathrm{KL}}[\pi\|\pi_{\mathrm{ref}}]$ を最大にする方策は、 $\pi_\beta\propto\pi_{\mathrm{ref}}\exp(r_\phi/\beta)$ です。学習の誤差を混ぜないために、この方策をそのまま使います。
# $\beta$ を小さくしていくと、プロキシと真の報酬はどう動くでしょうか。 $\lambda=1/\beta$ で微分すると、
#
# $$
# \frac{d}{d\lambda}\mathbb{E}[r_\phi]=\mathrm{Var}[r_\phi]\ge0,\qquad
# \frac{d}{d\lambda}\mathbb{E}[r]=\mathrm{Cov}[r_\phi,r],\qquad
# \frac{d}{d\lambda}D_{\mathrm{KL}}[\pi_\beta\|\pi_{\mathrm{ref}}]=\lambda\,\mathrm{Var}[r_\phi]
# $$
#
# です（分散と共分散は、 $\pi_\beta$ のもとで）。プロキシは **決して** 下がりません（点数が定数でないかぎり、上がりつづけます）。真の報酬が上がるか下がるかは、 $\pi_\beta$ のもとでの共分散の符号で決まります。

# %%
proxy = proxies[100]


def moments(lam):
    logps = tilt(start_logps, lam * proxy)
    return (expect(logps.exp(), proxy), expect(logps.exp(), gold),
            kl(logps, start_logps))


lam = torch.tensor(2.0).double()
(mean_proxy, mean_gold, _), slopes = torch.func.jvp(
    moments, (lam,), (torch.ones(()).double(),)
)

# %%
tilted = tilt(start_logps, lam * proxy).exp()
centred_proxy = proxy - mean_proxy[..., None]
variance_of_proxy = expect(tilted, centred_proxy**2)
covariance = expect(tilted, centred_proxy * (gold - mean_gold[..., None]))
claim("dE[r_φ]/dλ = Var[r_φ]", slopes[0], variance_of_proxy)
claim("dE[r]/dλ = Cov[r_φ, r]", slopes[1], covariance)
claim("dKL/dλ = λ Var[r_φ]", slopes[2], lam * variance_of_proxy)

# %% [markdown]
# $\beta$ を 100 から 0.03 まで動かし、プロンプトについて平均します。

# %%
lams = torch.logspace(-2, 1.5, 40).double()


def path(proxy):
    logps = tilt(start_logps, lams[:, None, None, None] * proxy)
    values = (expect(logps.exp(), proxy), expect(logps.exp(), gold),
              kl(logps, start_logps))
    return [v.mean(-1).T for v in values]  # それぞれ (シード, λ)


paths = {n: path(proxy) for n, proxy in proxies.items()}

# %%
from companion.plots import spread

drawn, (axes,) = figure(1, 2, panel=(4.2, 3.2))
for k, title in enumerate(("プロキシの期待値", "真の報酬の期待値")):
    axes[k].set_xscale("log")
    spread(1 / lams, {f"{n:,} 対": paths[n][k] for n in paths},
           ax=axes[k], title=title, xlabel="β（右へ行くほど小さい）")
    axes[k].invert_xaxis()
drawn

# %%
for n, (proxy_path, gold_path, _) in paths.items():
    peak = gold_path.max(-1).values
    check(f"{n:,} 対: プロキシは 8 シードすべてで上がりつづける",
          (proxy_path.diff() > 0).all())
    check(f"{n:,} 対: 真の報酬は、いったん上がる",
          (peak > gold_path[:, 0] + 0.1).all(),
          f"頂点 {peak.min():.2f}〜{peak.max():.2f}")

# %%
for n, (_, gold_path, _) in paths.items():
    fallen = gold_path.max(-1).values - gold_path[:, -1]
    check(f"{n:,} 対: その後、8 シードすべてで下がる",
          (fallen > 0.05).all(),
          f"{fallen.min():.2f}〜{fallen.max():.2f} 下がる")

# %% [markdown]
# 対を 10 倍にすると、頂点は高くなります。ところが、 $\beta$ を小さくしすぎたときの落ち方は、小さくなるどころか大きくなりました。
# $\beta\to0$ の行き先は、プロキシが一番高い回答です。それが何回比べられた回答なのかを調べます。

# %%
few, many = (paths[n][1].max(-1).values for n in (100, 1_000))
check("頂点の中央値は、対が多いほど高い",
      many.quantile(0.5) > few.quantile(0.5) + 0.05,
      f"{few.quantile(0.5):.2f} → {many.quantile(0.5):.2f}")

# %%
few, many = ((paths[n][1].max(-1).values - paths[n][1][:, -1])
             for n in (100, 1_000))
check("落ち方の中央値も、対が多いほど大きい",
      many.quantile(0.5) > few.quantile(0.5) + 0.1,
      f"{few.quantile(0.5):.2f} → {many.quantile(0.5):.2f}")

# %%
for n, fitted in proxies.items():
    top = fitted.argmax(-1, keepdim=True)
    seen = counts[n].gather(-1, top).double().flatten()
    mass = start_logps.exp().gather(-1, top).flatten()
    check(f"{n:,} 対: プロキシが一番高い回答は、数回しか比べられていない",
          seen.quantile(0.5) < 5,
          f"中央値 {seen.quantile(0.5):.0f} 回、参照方策の確率の中央値 "
          f"{mass.quantile(0.5):.3f}")

# %% [markdown]
# 参照方策ではめったに出てこない、比べられた回数の少ない回答です。数回の比較に続けて勝てば、点数は、更新を続けるかぎり上がります（ステップ 7）。対が増えると、めったに出てこない回答も少しずつ比べられるようになり、その中に、たまたま勝った回答が混ざるのだと考えられます。
# つまり、対を増やすことは、信じてよい範囲（参照方策の近く）を正確にしますが、その外を安全にするわけではありません。KL の正則化（4.4.3 節）が要る理由が、ここにあります。
#
# ### 実験 2：best-of-n とその KL
#
# 方策を学習させずにプロキシを使う方法もあります。参照方策から $n$ 個の回答を引いて、プロキシが一番高いものを選ぶ best-of-n です。
# 数え上げられる世界では、選ばれる確率が正確に書けます。参照方策から引いた回答のプロキシの値が、 $y$ の値以下、 $y$ の値未満である確率を $F_{\le}(y),\ F_{<}(y)$ とすると、
#
# $$
# P_n(y)=\pi_{\mathrm{ref}}(y)\,\frac{F_{\le}(y)^n-F_{<}(y)^n}{F_{\le}(y)-F_{<}(y)}
# $$
#
# です（同点なら、引いた中から等しい確率で選びます）。 $n=2$ のときを、40×40 通りの数え上げと比べます。

# %%
proxy = proxies[100]
start = start_logps.exp()
below = proxy[..., None, :] < proxy[..., :, None]
level = proxy[..., None, :] == proxy[..., :, None]
F_less = (below * start[..., None, :]).sum(-1)
F_tied = (level * start[..., None, :]).sum(-1)


def best_of(n):
    grown = ((F_less + F_tied) ** n - F_less**n) / F_tied
    return start * grown


# %%
wins = below.double() + level.double() / 2  # y が y' に勝つ確率
by_hand = 2 * start * (wins * start[..., None, :]).sum(-1)
claim("best-of-2 = 数え上げ", best_of(2), by_hand)
claim("best-of-1 は参照方策", best_of(1), start)
claim("Σ_y P_n(y) = 1", best_of(64).sum(-1), torch.ones(()))

# %% [markdown]
# KL も正確に計算できます。よく使われる $\log n-\frac{n-1}{n}$ は、点数に同点がなく、どの回答の確率も限りなく小さいとき（点数の分布が連続なとき）の値で、一般には **上限** でしかありません（Beirami ほか 2024）。

# %%
sizes = [2**k for k in range(11)]
chosen_probs = torch.stack([best_of(n) for n in sizes])
bon_kl = kl(chosen_probs.log(), start_logps)  # (n, シード, プロンプト)
bon_gold = expect(chosen_probs, gold).mean(-1)

# %%
counts_n = torch.tensor(sizes).double()
bound = counts_n.log() - (counts_n - 1) / counts_n
check("KL は、どのシード、どのプロンプトでも上限以下",
      (bon_kl <= bound[:, None, None] + 1e-12).all())

# %%
for k in (1, 4, 10):
    print(f"n = {sizes[k]:4d}: KL の平均 {bon_kl[k].mean():.3f}、"
          f"log n − (n − 1)/n = {bound[k]:.3f}")

# %%
mean_kl = bon_kl.mean(-1)  # (n, シード)
drawn, (axes,) = figure(1, 2, panel=(4.2, 3.2))
axes[0].plot(paths[100][2].T, paths[100][1].T, color=COLOURS[1], alpha=0.5)
axes[0].plot(mean_kl, bon_gold, "o", color=COLOURS[2], markersize=3)
axes[0].plot([], [], color=COLOURS[1], label="β を変えて傾ける")
axes[0].plot([], [], "o", color=COLOURS[2], label="best-of-n")
axes[0].set(xlabel="参照方策からの KL（nat）",
            title="真の報酬（8 シード、100 対）")
axes[0].legend(loc="upper right")
axes[1].plot(sizes, bound, color=GREY, linestyle="--",
             label="log n − (n − 1)/n")
spread(sizes, {"正確な KL": mean_kl.T}, ax=axes[1], colour=COLOURS[2],
       xlabel="n", title="best-of-n の KL（nat）")
axes[1].set_xscale("log", base=2)
drawn

# %% [markdown]
# best-of-n でも、 $n$ を増やすと真の報酬は上がってから下がります。学習をしないからといって、過剰最適化と無縁ではありません。
# ただ、この世界では、best-of-n の頂点のほうが高くなりました。プロキシについては、同じ KL なら傾けた方策が最良です（4.4.3 節）が、真の報酬についてはそうとは限りません。best-of-n はプロキシの **順位** しか使わないので、点数が極端に高い回答に引きずられにくいのだと考えられます。

# %%
top_of_bon = bon_gold.max(0).values
turned = top_of_bon - bon_gold[-1]
check("best-of-n でも、8 シードすべてで上がってから下がる",
      (turned > 0.05).all() and (top_of_bon > bon_gold[0] + 0.1).all(),
      f"{turned.min():.2f}〜{turned.max():.2f} 下がる")
lead = top_of_bon - paths[100][1].max(-1).values
check("8 シードすべてで、頂点は傾けた方策より高い", (lead > 0).all(),
      f"差 {lead.min():.2f}〜{lead.max():.2f}")

# %%
check("n = 1,024 では、上限は正確な KL よりずっと大きい",
      bound[-1] > mean_kl[-1].max() + 0.5,
      f"{bound[-1]:.2f} に対して {mean_kl[-1].max():.2f} 以下")

# %% [markdown]
# ### 実験 3：同じことを、学習した報酬モデルと言語モデルで
#
# 「学習」で学習した報酬モデルを使って、best-of-n をやってみます。学習に出てこない 200 問で、SFT 済みの言語モデルから 32 個ずつ回答を引き、点数を付けます。

# %%
from companion.lm import generate

sft_model, _ = load("sorting", rm_preset.size)
questions = SORTING.test_prompts[:200]
repeated = [x for x in questions for _ in range(32)]
answers = generate(sft_model, tokenizer, repeated, max_new_tokens=8,
                   temperature=1.0)
rm_scores = score(sorting_rm, tokenizer, repeated, answers)
rm_scores = rm_scores.view(200, 32)

# %%
measures = {
    "真の報酬": [SORTING.reward(x, y)
             for x, y in zip(repeated, answers, strict=True)],
    "正解率": [float(SORTING.answer(x) == y)
            for x, y in zip(repeated, answers, strict=True)],
    "点数": rm_scores.flatten().tolist(),
}
measures = {name: torch.tensor(v).view(200, 32).double()
            for name, v in measures.items()}

# %% [markdown]
# 32 個から $n$ 個を選ぶすべての選び方についての平均は、点数の低い順に並べて、 $i$ 番目（ $i=0,1,\ldots$ ）が最大になる確率 $\binom{i}{n-1}/\binom{32}{n}$ で重みを付ければ、一度に計算できます。

# %%
from math import comb

order = rm_scores.argsort(1)
ns = (1, 2, 4, 8, 16, 32)


def mean_of_best(values, n):
    weights = [comb(i, n - 1) / comb(32, n) for i in range(32)]
    weights = torch.tensor(weights).double()
    return (values.gather(1, order) @ weights).mean().item()


best = pd.DataFrame({
    name: [mean_of_best(values, n) for n in ns]
    for name, values in measures.items()
}, index=pd.Index(ns, name="n"))
best.round(3)

# %%
drawn, (axes,) = figure(1, 3, panel=(2.9, 2.6))
for ax, name, colour in zip(
    axes, ("点数", "真の報酬", "正解率"), COLOURS, strict=False
):
    ax.plot(ns, best[name], "o-", color=colour)
    ax.set_xscale("log", base=2)
    ax.set(title=name, xlabel="n")
drawn

# %%
accuracy = best["正解率"]
possible = measures["正解率"].amax(1).mean()
check("点数は n とともに上がる", best["点数"].is_monotonic_increasing)
check("正解率は、n = 4 までは上がる", accuracy[4] > accuracy[1] + 0.15,
      f"{accuracy[1]:.3f} → {accuracy[4]:.3f}")
check("n = 32 では、n = 4 よりずっと低い",
      accuracy[32] < accuracy[4] - 0.2,
      f"{accuracy[32]:.3f}（32 個の中に正解がある問題は {possible:.1%}）")

# %% [markdown]
# 32 個の中には、ほとんどいつも正解が入っています。それなのに、報酬モデルが一番高い点数を付けたのは、多くの問題で、正解ではありませんでした。正解率は、1 個だけ引いたとき（n = 1）よりも低くなっています（1 回の学習の結果です。演習 4 で、種を変えてみてください）。何が選ばれたのでしょうか。

# %%
top = rm_scores.argmax(1)
chosen_32 = [answers[32 * i + j] for i, j in enumerate(top.tolist())]
right_answers = [SORTING.answer(x) for x in questions]
is_wrong = [y != a for y, a in zip(chosen_32, right_answers, strict=True)]
not_six = sum(len(y) != 6 for y in chosen_32)
print(f"200 問のうち、間違い {sum(is_wrong)} 問、"
      f"そのうち 6 桁でないもの {not_six} 問")
check("間違いの大半は、6 桁の間違い", not_six < sum(is_wrong) / 2)

# %%
shown = [i for i, wrong in enumerate(is_wrong) if wrong][:6]
chosen_scores = rm_scores.amax(1)
pd.DataFrame({
    "プロンプト": [questions[i] for i in shown],
    "選ばれた回答": [chosen_32[i] for i in shown],
    "その点数": [round(chosen_scores[i].item(), 2) for i in shown],
    "正解": [right_answers[i] for i in shown],
    "正解の点数": score(
        sorting_rm, tokenizer, [questions[i] for i in shown],
        [right_answers[i] for i in shown],
    ).numpy().round(2),
})

# %% [markdown]
# 学習していない対で順序を 9 割近く当てる報酬モデルでも、32 個の中の一番を選ばせると、点数を高く付け間違えた回答のほうを、たびたび選びます。間違いの大半は、学習データにも出てくるような 6 桁の間違いです。平均の正解率が高いことと、**最大** を選んだときに信じられることは、別のことです。

# %% [markdown]
# ## 演習
#
# 1. **実装と採点** 演習ノートブック [exercises/4.4.2-reward-model.ipynb](exercises/4.4.2-reward-model.ipynb) で、式 (4.8) を自分で実装し、仕込まれたバグを「成り立つはずの恒等式」で見つけ、数を予想してから測ってください。
# 2. **更新の回数** 実験 1 の `fit_proxy` の更新回数を、200 回から 20 回、2,000 回に変えると、プロキシと真の報酬の曲線はどう変わるでしょうか。ステップ 7 をもとに予想してから確かめてください。
# 3. **点数を 0 に引き戻す** `fit_proxy` の損失に `0.01 * proxy.square().mean()` を足すと、過剰最適化はどうなるでしょうか。比べられたことのない回答の点数は、どうなるでしょうか。
# 4. **種を変える** 実験 3 を、報酬モデルの学習の種（ `rm_preset.arguments(seed=…)` ）を変えて繰り返してください。正解率が一番高い $n$ は、どれくらい動くでしょうか。
# 5. **K-wise の順位** ステップ 8 の報酬を $r=(3,0,-3)$ に変えると、「独立とみなす」ことによる見積もりの誤りは大きくなるでしょうか、小さくなるでしょうか。

# %% [markdown]
# ## 参考文献
#
# - Bradley, Terry. Rank Analysis of Incomplete Block Designs: I. The Method of Paired Comparisons. Biometrika 39, 1952. ステップ 1 の選好モデルです。
# - Ford. Solution of a Ranking Problem from Binary Comparisons. The American Mathematical Monthly 64, 1957. ステップ 7 の、有限のデータで最小点がある条件です。
# - Plackett. The Analysis of Permutations. Applied Statistics 24, 1975. ステップ 8 の順位のモデルです。
# - Christiano, Leike, Brown, Martic, Legg, Amodei. Deep Reinforcement Learning from Human Preferences. 2017. [arXiv:1706.03741](https://arxiv.org/abs/1706.03741) 比較から報酬を学び、強化学習に使った論文です。
# - Ouyang ほか. Training Language Models to Follow Instructions with Human Feedback. 2022. [arXiv:2203.02155](https://arxiv.org/abs/2203.02155) 順位を対に分けて式 (4.8) で学習しています。
# - Gao, Schulman, Hilton. Scaling Laws for Reward Model Overoptimization. 2022. [arXiv:2210.10760](https://arxiv.org/abs/2210.10760) 実験 1 と 2 の現象を、大きなモデルで調べています。
# - Beirami ほか. Theoretical Guarantees on the Best-of-n Alignment Policy. 2024. [arXiv:2401.01879](https://arxiv.org/abs/2401.01879) best-of-n の KL の公式が上限であることを示しています。
# - TRL 1.12.0 `RewardTrainer`（`trl/trainer/reward_trainer.py`）。
