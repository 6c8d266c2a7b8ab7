#!/bin/bash
# Stage I on Slurm: TRAIN_NODES nodes of 8 GPUs learn, SERVER_NODES beside them sample with vLLM.
#   MODEL=runs/qwen3-4b/warm/checkpoint EXPERTS=my_experts.yaml \
#     sbatch --nodes 2 stages/launch/slurm_stage1.sh stages/recipes/stage1_qwen3-4b.yaml
# Submit it again to go on after a time limit: the run resumes from its folder, which has to be on
# a file system that all nodes share. Not measured: no cluster was at hand.
#SBATCH --job-name=rivet-stage1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
set -euo pipefail

RECIPE=${1:?usage: sbatch --nodes N $0 RECIPE.yaml [--name value ...]}
shift
SERVER_NODES=${SERVER_NODES:-1}
EXPERTS=${EXPERTS:?set EXPERTS to a file that names the servers of the experts by host, not as 127.0.0.1}
MODEL=${MODEL:?set MODEL to the checkpoint that the recipe starts from}

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
TRAIN_NODES=$(( ${#NODES[@]} - SERVER_NODES ))
(( TRAIN_NODES > 0 )) || { echo "of ${#NODES[@]} nodes $SERVER_NODES serve: none is left" >&2; exit 2; }
SERVERS=("${NODES[@]:TRAIN_NODES}")
HEAD=${NODES[0]}

cleanup() { kill "${SERVER_PIDS[@]:-}" 2>/dev/null || true; }
trap cleanup EXIT

SERVER_PIDS=() URLS=()
for node in "${SERVERS[@]}"; do
  # Whole weights arrive by NCCL; with use_peft: true set SERVER_ARGS="--max_lora_rank 64".
  # shellcheck disable=SC2086 # several words are meant
  srun --nodes 1 --ntasks 1 --nodelist "$node" \
    python -m stages.cli vllm "$MODEL" --host 0.0.0.0 --port 8000 \
    ${SERVER_ARGS:---weight_transfer --tensor-parallel-size 8} &
  SERVER_PIDS+=($!)
  URLS+=("http://$node:8000")
done
for url in "${URLS[@]}"; do
  until curl --silent --fail "$url/v1/models" >/dev/null; do
    for pid in "${SERVER_PIDS[@]}"; do kill -0 "$pid" || { echo "a server died" >&2; exit 1; }; done
    sleep 5
  done
done
# torchrun ends every process of the job when one dies, and prints that one's reason. Asked to stop,
# it gives them 30 s to save the step under way unless it is told otherwise.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280
srun --nodes "$TRAIN_NODES" --ntasks "$TRAIN_NODES" --nodelist "$(IFS=,; echo "${NODES[*]:0:TRAIN_NODES}")" \
  bash -c 'exec accelerate launch --config_file stages/launch/fsdp2.yaml \
    --num_machines '"$TRAIN_NODES"' --num_processes $(( '"$TRAIN_NODES"' * 8 )) \
    --machine_rank "$SLURM_PROCID" --main_process_ip '"$HEAD"' --main_process_port 29500 \
    -m stages.cli stage1 "$@"' -- "$RECIPE" --experts "$EXPERTS" --backend vllm --vllm_urls "${URLS[@]}" "$@" &
LEARNER=$!
# The warning before the time limit comes to this shell alone, because the servers have to outlive
# the learner. It goes on to the learner's step, which is the one after the servers'; not to srun,
# which answers a SIGTERM by killing its tasks.
trap 'scancel --signal=TERM "$SLURM_JOB_ID.${#SERVERS[@]}"' TERM
CODE=0
wait "$LEARNER" || CODE=$?
while kill -0 "$LEARNER" 2>/dev/null; do  # a signal ends `wait` early
  CODE=0
  wait "$LEARNER" || CODE=$?
done
exit "$CODE"
