//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T1301: "a CUDA library is missing",
    "A run on GPUs needs the driver (libcuda.so.1), NVRTC and cuBLASLt of CUDA 13, cuDNN \
9, and, for more than one GPU, NCCL. One of them is missing or failed to load; the message \
names it. Runs on the CPU need none of them.\n\n\
The driver's own libraries, libcuda.so.1 and libnvidia-ml.so.1, come with the machine, and only \
the system's loader can find them. A container has them only if it was started with GPUs.\n\n\
Tessera searches for each other library in four places and takes the first file that loads: the \
folders of TESSERA_CUDA_LIBS (separated by colons), the folders nvidia/*/lib of each Python on \
PATH (where PyTorch's wheels install them), /usr/local/cuda, and the folders of the system's \
loader. `pip install torch` installs all of them, and so do the wheels nvidia-cuda-nvrtc, \
nvidia-cublas, nvidia-cudnn-cu13 and nvidia-nccl-cu13. `tessera doctor` lists the libraries \
that it found, with their paths.";

    T1302: "the driver cannot be used",
    "The driver's library loaded, but it failed to initialise or to list its GPUs. The message carries the driver's own error \
name. NO_DEVICE: no GPU is visible, as when CUDA_VISIBLE_DEVICES hides all or a container was started without any. \
SYSTEM_DRIVER_MISMATCH: the library's version differs from the kernel module's, as after an update without a reboot. \
SYSTEM_NOT_READY: the fabric manager of NVSwitch machines is not running. STUB_LIBRARY: a toolkit's folder of stubs is on \
LD_LIBRARY_PATH and hides the driver; remove it. `nvidia-smi` shows what the driver itself sees.";

    T1303: "NCCL failed",
    "An NCCL function failed outside a run; the message carries NCCL's own error text. Creating a group's id needs no GPU, but \
it needs a network interface that the other members can reach: NCCL_SOCKET_IFNAME selects one if NCCL picks the wrong one, and \
NCCL_DEBUG=WARN makes NCCL print details on standard error. If a function is missing, the library is older than 2.18: `tessera doctor` \
shows the loaded version and its path, and TESSERA_CUDA_LIBS lists folders that are searched first.";

    T1304: "the GPU or one of its libraries returned an error",
    "A call to the driver, NVRTC, cuBLASLt or cuDNN failed while a rank was being prepared. The text is the library's own, with \
the call and the requested shape.\n\nToo little free memory is the usual reason: another process may hold some, which nvidia-smi lists, \
or an earlier run may still be exiting. If a library has no algorithm for a shape, the message gives the shape's sizes; another mesh or \
dtype may work. Each rank needs its own GPU: if there are more ranks than visible GPUs, the message states both numbers. A lost device \
returns errors from every call until an administrator resets it.";

    T1305: "unknown GPU feature",
    "TESSERA_MASK_FEATURES lists features of a GPU that a run must not use, separated by commas, so that the path of other \
GPUs can be tested on a GPU that has them. The only name is `hopper`: the kernels with TMA and wgmma for sm_90. cuBLASLt, cuDNN and \
plain kernels take their place, with other last bits where docs/design/0014 says so. All ranks of a run must mask the same features. \
`tessera doctor` prints which kernels remain.";
}
