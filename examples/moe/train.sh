#!/usr/bin/env bash
# Trains a small mixture of experts on four CPU ranks: nested sequence parallelism with expert
# parallel size 2. The experts see ordinary data parallelism; only attention is nested.
#
#   examples/moe/train.sh [more flags]
#
# More flags go last and win over those below. Environment: PYTHON (interpreter), DATA (prefix of
# the corpus, built if it is not there).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-.venv/bin/python}
data=${DATA:-build/corpus/stdlib}
export OMP_NUM_THREADS=1 # four ranks share the cores of one machine

if [ ! -f "$data.idx" ]; then
  "$python" examples/cpu/build_corpus.py --output "$data"
fi

model=(
  --num-layers 2
  --hidden-size 128
  --ffn-hidden-size 384
  --swiglu
  --normalization RMSNorm
  --disable-bias-linear
  --hidden-dropout 0
  --position-embedding-type rope
  --num-attention-heads 4
  --kv-channels 16
  --group-query-attention
  --num-query-groups 2
)
experts=(
  --num-experts 4
  --expert-model-parallel-size 2 # two experts on a rank
  --moe-router-topk 2
  --moe-ffn-hidden-size 192
  --moe-token-dispatcher-type alltoall # ranks hold different numbers of tokens
  --moe-router-load-balancing-type aux_loss
  --moe-aux-loss-coeff 1e-2 # by what the tokens of all ranks choose
)
corpus=(
  --data-path "$data"
  --split 100,0,0 # train on all documents ...
  --eval-iters 0 # ... and evaluate on none
  --tokenizer-type NullTokenizer # tokens are bytes
  --vocab-size 256
  --seq-length 4096 # the longest document to train on; longer ones are left out and counted
  --max-position-embeddings 4096
)
nesting=(
  --nsp-cpu                  # Megatron's loop on CPU ranks, over gloo; no grouped GEMM there
  --nsp-batch-tokens 10240   # tokens of one optimizer step, in whole documents
)
training=(
  --train-iters 40
  --lr 2e-3
  --min-lr 2e-4
  --lr-decay-style cosine
  --lr-warmup-fraction 0.1
  --clip-grad 1.0
  --seed 15
  --log-interval 1
)

exec "$python" -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_nsp.py \
  "${model[@]}" "${experts[@]}" "${corpus[@]}" "${nesting[@]}" "${training[@]}" "$@"
