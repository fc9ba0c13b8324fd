"""Examples at the end of each command's help; they can be pasted, and a test parses them."""

EXAMPLES = {
    "serve": """
paged serve                                         # the demo model, at http://localhost:8000/v1
paged serve Qwen/Qwen3-0.6B --api-key secret        # a model of the Hub, for those with the key
paged serve model.gguf --port 9000 --max-model-len 8K
paged serve meta-llama/Llama-3.1-70B-Instruct -tp 4 # one model on four GPUs
paged serve MODEL --kv-offloading-size 16           # keep what leaves the GPU in 16 GiB of memory
""",
    "chat": """
paged chat                                          # with the demo model, until the input ends
paged chat model.gguf --temperature 0.7
paged chat -q 'What is a KV cache?'                 # one answer
paged chat --url http://localhost:8000/v1           # with a server that runs
""",
    "generate": """
paged generate -p 'The sky is' --max-tokens 20
paged generate -p 'One' -p 'Two' --temperature 0    # several prompts at once
paged generate model.gguf < prompt.txt
""",
    "run-batch": """
paged run-batch -i requests.jsonl -o answers.jsonl
paged run-batch -i requests.jsonl -o answers.jsonl --url http://localhost:8000/v1
""",
    "compile": """
paged compile --gpu h100 --out llama-h100 meta-llama/Llama-3.1-8B-Instruct
paged compile --out programs                        # for the device of this machine
""",
    "convert": """
paged convert model.gguf --out model-bf16
paged convert Qwen/Qwen3-0.6B --quantization int8 --out qwen3-int8
""",
    "plan": """
paged plan llama-3.1-8b                             # all GPUs of the table, a line each
paged plan llama-3.1-70b --gpu h100 -tp 4 --input-len 4000
paged plan MODEL --gpu h100,h200 --quantization fp8
""",
    "simulate": """
paged simulate --policy all                         # all eviction policies, side by side
paged simulate --trace chat --gpu h100 --model llama-3.1-8b --request-rate 4
paged simulate --trace trace.jsonl --num-blocks 1000,2000,4000
""",
    "doctor": """
paged doctor http://localhost:8000
paged doctor http://localhost:8000 --seconds 60     # where requests are few
paged doctor http://localhost:8000 --compare a.txt b.txt
""",
    "build-native": """
paged build-native                                  # so that the first start need not
""",
    "bench": """
paged bench throughput --num-prompts 16
paged bench serve --request-rate 4
paged bench serve --help                            # all options of a benchmark
""",
    "bench throughput": """
paged bench throughput --num-prompts 64 --input-len 512 --output-len 128
paged bench throughput model.gguf --dataset-name sharegpt --json result.json
""",
    "bench latency": """
paged bench latency --batch-size 1
paged bench latency model.gguf --batch-size 8 --input-len 512 --output-len 64
""",
    "bench serve": """
paged bench serve                                   # all 1,000 requests at once
paged bench serve --request-rate 4 --num-prompts 500 --html report.html
paged bench serve --base-url http://HOST:8000 --max-concurrency 16 --goodput ttft:500 tpot:50
""",
    "bench sweep": """
paged bench sweep --vary request-rate=1,2,4,8,16 --num-prompts 200 --html sweep.html
paged bench sweep --serve-args 'MODEL' --vary-server max-num-seqs=8,32 --vary max-concurrency=8,32
""",
    "bench compare": """
paged bench compare before.json after.json
paged bench compare before/ after/ --fail-if-worse  # medians of the runs in two folders
""",
}
"""By command, a line each; what follows a # is a remark."""
