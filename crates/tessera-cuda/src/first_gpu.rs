//! The first GPU, for tests of this crate that want one.

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::compile::Compiler;
use crate::driver::Context;
use crate::libraries::Libraries;
use crate::tables::Nvrtc;

/// A GPU and what compiles for it.
#[derive(Debug)]
pub(crate) struct FirstGpu {
    pub(crate) compiler: Compiler,
    pub(crate) capability: (i32, i32),
    pub(crate) multiprocessors: i32,
    pub(crate) context: Context,
    pub(crate) libraries: Libraries,
}

/// Says what a test is skipped for, if there is none.
pub(crate) fn first_gpu() -> Option<FirstGpu> {
    let libraries = Libraries::load(&[]);
    let (Ok(_), Ok(nvrtc)) = (libraries.need(crate::Library::Driver), Nvrtc::load(&libraries)) else {
        eprintln!("skipped: no driver or no NVRTC");
        return None;
    };
    let Ok(context) = Context::open(0) else {
        eprintln!("skipped: no GPU");
        return None;
    };
    let told = |which| context.attribute(which).unwrap();
    let capability = (
        told(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        told(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    );
    let multiprocessors = told(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    let compiler = Compiler::new(nvrtc, capability, None).unwrap();
    Some(FirstGpu { compiler, capability, multiprocessors, context, libraries })
}
