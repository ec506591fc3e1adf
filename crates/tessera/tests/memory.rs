//! Memory of a stream of 1,000 chunks: every byte that the process allocates is counted, and none is
//! kept from chunk to chunk.

#![allow(unsafe_code, reason = "an allocator that counts")]
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use tessera::{Mapping, Model, Overrides, StreamRequest, local, plan};

/// Counts the bytes that the process has allocated and not freed.
struct CountingAllocator;

static LIVE_BYTES: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call goes to the system's allocator; the counter allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's layout is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller got the memory from this allocator, and so from the system's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Chunks after which all tables and queues have their final size.
const SETTLED: u32 = 100;
const CHUNKS: u32 = 1_000;

/// Streams on two ranks, and returns the growth of live memory in bytes per chunk. `on_chunk` receives
/// the latents of every chunk.
fn measure_growth(on_chunk: impl Fn(&[u8])) -> f64 {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wan-even");
    let overrides = Overrides { steps: Some(vec![1000.0]), ..Overrides::default() };
    let model = Model::open(&dir, &overrides).unwrap();
    let mapping = Mapping { mesh: "tp=2".parse().unwrap(), ..Mapping::default() };
    let plan = Arc::new(plan::plan_model(&model.video, &model.name, "", &mapping).unwrap());
    let requests = (0..CHUNKS).map(|chunk| StreamRequest {
        prompt: (chunk == 0).then(|| "a red square".to_string()),
        ..StreamRequest::default()
    });
    let mut settled = 0;
    local::run(&plan, &model, 1, requests, |chunk| {
        on_chunk(chunk.latents.data());
        if chunk.chunk == SETTLED {
            settled = LIVE_BYTES.load(Ordering::Relaxed);
        }
        if chunk.chunk == CHUNKS - 1 {
            settled -= LIVE_BYTES.load(Ordering::Relaxed);
        }
    })
    .unwrap();
    -settled as f64 / f64::from(CHUNKS - 1 - SETTLED)
}

// proves: K-14
#[test]
fn a_thousand_chunks_keep_no_memory_and_a_leak_of_one_buffer_per_chunk_is_found() {
    /// A chunk that keeps one word more than the chunk before exceeds this.
    const LIMIT: f64 = 8.0;
    let growth = measure_growth(|_| {});
    assert!(growth.abs() < LIMIT, "{growth} bytes per chunk");
    let leaking = measure_growth(|latents| std::mem::forget(latents.to_vec()));
    assert!(leaking > LIMIT, "the leak of a copy of the latents was not found: {leaking} bytes per chunk");
}
