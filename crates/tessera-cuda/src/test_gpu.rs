//! The first GPU, for tests of this crate.

use crate::capabilities::{Capabilities, FeatureMask};
use crate::compile::Compiler;
use crate::driver::Context;
use crate::dylib::Nvrtc;
use crate::libraries::Libraries;
use crate::required_gpus::{REQUIRE_GPUS, assert_may_skip};

/// What a test needs to compile and run kernels on GPU 0.
#[derive(Debug)]
pub(crate) struct TestGpu {
    pub(crate) compiler: Compiler,
    pub(crate) capabilities: Capabilities,
    pub(crate) context: Context,
    pub(crate) libraries: Libraries,
}

/// Opens the first GPU. Returns `None`, and prints why the test is skipped, if there is no GPU.
///
/// # Panics
/// Panics instead of returning `None` if [`REQUIRE_GPUS`] is set to 1 or more, and then also without
/// cuBLASLt, which most of the tests need.
#[allow(clippy::disallowed_methods, reason = "the environment says whether the test may be skipped")]
pub(crate) fn open_test_gpu() -> Option<TestGpu> {
    let required = std::env::var(REQUIRE_GPUS).ok();
    let skip = |why: &str| {
        assert_may_skip(required.as_deref(), 1, why);
        eprintln!("skipped: {why}");
    };
    let libraries = Libraries::load(&[]);
    let (Ok(_), Ok(nvrtc)) = (libraries.check_loaded(crate::Library::Driver), Nvrtc::load(&libraries)) else {
        skip("no driver or no NVRTC");
        return None;
    };
    let Ok(context) = Context::open(0) else {
        skip("no GPU");
        return None;
    };
    if libraries.check_loaded(crate::Library::CublasLt).is_err() {
        assert_may_skip(required.as_deref(), 1, "no cuBLASLt");
    }
    let capabilities = Capabilities::query(&context, FeatureMask::default()).unwrap();
    let compiler = Compiler::new(nvrtc, capabilities.architecture(), None).unwrap();
    Some(TestGpu { compiler, capabilities, context, libraries })
}
