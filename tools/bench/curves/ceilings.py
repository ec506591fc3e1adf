"""Measures the rates that GEMMs, attention, elementwise kernels and grouped GEMMs reach when a CUDA graph replays them.

The program needs 1 GPU and takes less than 3 minutes.
"""
import torch, time, json
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction=True
dev='cuda'
def bench(f, ms=30):
    for _ in range(3): f()
    torch.cuda.synchronize()
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    g=torch.cuda.CUDAGraph()
    with torch.cuda.stream(s):
        f(); torch.cuda.synchronize()
        with torch.cuda.graph(g, stream=s):
            for _ in range(8): f()
    torch.cuda.synchronize()
    a,b=torch.cuda.Event(True),torch.cuda.Event(True)
    g.replay(); torch.cuda.synchronize()
    a.record(); g.replay(); b.record(); torch.cuda.synchronize()
    n=max(1,min(50,int(ms/max(a.elapsed_time(b),1e-3))))
    a.record()
    for _ in range(n): g.replay()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b)/n/8*1e3
def gemm_bf16(m,n,k):
    x=torch.randn(m,k,device=dev,dtype=torch.bfloat16); w=torch.randn(n,k,device=dev,dtype=torch.bfloat16); o=torch.empty(m,n,device=dev,dtype=torch.bfloat16)
    us=bench(lambda: torch.matmul(x,w.t(),out=o)); return us, 2*m*n*k/us/1e6
def gemm_fp8(m,n,k):
    x=torch.randn(m,k,device=dev).to(torch.float8_e4m3fn); w=torch.randn(n,k,device=dev).to(torch.float8_e4m3fn)
    sa=torch.ones(m,1,device=dev); sb=torch.ones(1,n,device=dev)
    us=bench(lambda: torch._scaled_mm(x,w.t(),scale_a=sa,scale_b=sb,out_dtype=torch.bfloat16)); return us, 2*m*n*k/us/1e6
print(torch.__version__, torch.cuda.get_device_name(), flush=True)
t0=time.time()
shapes=[]
W={'qkv':(15360,5120),'o':(5120,5120),'up':(13824,5120),'down':(5120,13824)}
for m in (4680,2340,1170,585,2160,1080,540,270):
    for nm,(n,k) in W.items():
        for tp in (1,2,4,8):
            nn,kk=(n//tp,k) if nm in('qkv','up') else (n,k//tp)
            if tp==1 or m in (4680,2160): shapes.append((m,nn,kk))
for m in (1,16,64,128,256,512,1024,2048,4096,8192,16384):
    for n,k in ((4096,4096),(8192,8192),(14336,4096),(4096,14336),(7168,2048),(1024,4096)): shapes.append((m,n,k))
for f,nm in ((gemm_bf16,'bf16'),(gemm_fp8,'fp8')):
    for s in dict.fromkeys(shapes):
        if time.time()-t0>(75 if nm=='bf16' else 110): break
        try:
            us,tf=f(*s); print('gemm',nm,*s,'%.2f us %.0f TF'%(us,tf),flush=True)
        except Exception as e: print('gemm',nm,*s,'failed',str(e)[:80],flush=True)
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend
for h,q,k in ((40,4680,9360),(20,4680,9360),(10,4680,9360),(5,4680,9360),(40,2160,4320),(20,2160,4320),(10,2160,4320),(5,2160,4320),(40,4680,512),(40,2160,512),(10,2160,512),(40,1170,9360),(40,540,4320),(40,4680,4680),(40,4680,28080),(40,2160,12960),(32,128,4096),(32,1,4096),(32,1,16384)):
    a=torch.randn(1,h,q,128,device=dev,dtype=torch.bfloat16); b=torch.randn(1,h,k,128,device=dev,dtype=torch.bfloat16); c=torch.randn_like(b)
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            us=bench(lambda: F.scaled_dot_product_attention(a,b,c))
        print('attention',h,q,k,'%.2f us %.0f TF'%(us,4*h*q*k*128/us/1e6),flush=True)
    except Exception as e: print('attention',h,q,k,'failed',str(e)[:80],flush=True)
for mb in (.016,.064,.25,1,4,16,64,256,1024):
    n=int(mb*2**20/2); x=torch.randn(n,device=dev,dtype=torch.bfloat16); y=torch.empty_like(x); z=torch.randn_like(x)
    us=bench(lambda: y.copy_(x)); ua=bench(lambda: torch.add(x,z,out=y))
    print('elementwise %.3f MiB copy %.2f us %.0f GB/s, add %.2f us %.0f GB/s'%(mb,us,4*n/us/1e3,ua,6*n/us/1e3 if 0 else 6*n/ua/1e3),flush=True)
if hasattr(torch,'_grouped_mm'):
    for e,rows,n,k in ((32,32,4096,7168),(32,128,4096,7168),(32,256,4096,7168),(32,1024,4096,7168),(64,64,4096,7168),(64,512,4096,7168),(8,128,4096,7168),(8,1024,4096,7168),(32,128,7168,2048),(32,1024,7168,2048),(8,4096,2048,2048)):
        x=torch.randn(e*rows,k,device=dev,dtype=torch.bfloat16); w=torch.randn(e,n,k,device=dev,dtype=torch.bfloat16); o=(torch.arange(e,device=dev,dtype=torch.int32)+1)*rows
        try:
            us=bench(lambda: torch._grouped_mm(x,w.transpose(-2,-1),offs=o)); print('grouped',e,rows,n,k,'%.2f us %.0f TF'%(us,2*e*rows*n*k/us/1e6),flush=True)
        except Exception as ex: print('grouped failed',str(ex)[:80],flush=True)
        del x,w
print('took %.0f s'%(time.time()-t0))
