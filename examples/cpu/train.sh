#!/usr/bin/env bash
# Trains a small GPT on four CPU ranks with nested sequence parallelism.
#
#   examples/cpu/train.sh [more flags]
#
# More flags go last and win over those below, for example `--train-iters 5` or
# `--nsp-policy static-4`. Environment: PYTHON (interpreter), DATA (prefix of the corpus).
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
  --num-attention-heads 4 # a degree must divide the query heads ...
  --kv-channels 16
  --group-query-attention
  --num-query-groups 2 # ... and divide these, or be a multiple of them: 1, 2 and 4 all do
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
  --nsp-cpu                  # Megatron's loop on CPU ranks, over gloo
  --nsp-batch-tokens 10240   # tokens of one optimizer step, in whole documents
)
training=(
  --train-iters 40
  --lr 2e-3
  --min-lr 2e-4
  --lr-decay-style cosine
  --lr-warmup-fraction 0.1
  --clip-grad 1.0
  --seed 15 # also the order of the documents
  --log-interval 1
)

exec "$python" -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_nsp.py \
  "${model[@]}" "${corpus[@]}" "${nesting[@]}" "${training[@]}" "$@"
