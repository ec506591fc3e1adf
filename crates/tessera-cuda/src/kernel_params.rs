//! Typed parameters of kernels. [`kernel_signatures!`] declares one struct per signature, with a
//! field for each parameter, and one constant per kernel that has it. A launch takes the struct, so
//! the compiler checks the number, the order and the width of the arguments.
//!
//! A host test compares every declaration with the `__global__` function of the CUDA source.

#![allow(unsafe_code, reason = "addresses of arguments for the driver")]

use std::ffi::c_void;
use std::marker::PhantomData;

use cudarc::driver::sys::CUtensorMap;

use crate::driver::{CudaModule, CudaResult, CudaStream, KernelFunction};

/// A kernel by name, with the type of its parameters.
#[derive(Debug)]
pub(crate) struct Kernel<P> {
    name: &'static str,
    params: PhantomData<fn(P)>,
}

// Derived impls would require `P: Copy`.
impl<P> Clone for Kernel<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Kernel<P> {}

impl<P> Kernel<P> {
    pub(crate) const fn new(name: &'static str) -> Kernel<P> {
        Kernel { name, params: PhantomData }
    }

    pub(crate) const fn name(&self) -> &'static str {
        self.name
    }
}

/// The arguments of a kernel.
///
/// # Safety
/// `addresses` must return the address of each argument in the order of the kernel's parameters, each
/// of a value of its parameter's type that lives as long as the borrow.
pub(crate) unsafe trait KernelParams: std::fmt::Debug {
    /// Returns the address of each argument.
    fn addresses(&self) -> Vec<*mut c_void>;
}

/// Returns the address of an argument, which the driver only reads.
pub(crate) fn argument_address<T: KernelParam>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}

/// One declared parameter of a kernel.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Param {
    /// Its name in the CUDA source.
    pub(crate) name: &'static str,
    /// Its type.
    pub(crate) ty: ParamType,
    /// Its size in bytes.
    pub(crate) bytes: usize,
}

#[cfg(test)]
impl Param {
    pub(crate) const fn new<T: KernelParam>(name: &'static str) -> Param {
        Param { name, ty: T::TYPE, bytes: size_of::<T>() }
    }
}

/// The type of a parameter, by the names that it may have in CUDA source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "read by a test"))]
pub(crate) enum ParamType {
    /// A number or a struct, passed by value.
    Value(&'static str),
    /// A device address of elements of one of these types.
    Pointer(&'static [&'static str]),
}

/// A Rust type with the size and the bits of a kernel's parameter.
pub(crate) trait KernelParam: Copy {
    #[cfg_attr(not(test), allow(dead_code, reason = "read by a test"))]
    const TYPE: ParamType;
}

/// Declares the names that types have in CUDA source.
macro_rules! c_types {
    ($($value:ty = $name:literal,)*; $($element:ty = [$($pointee:literal),*],)*) => {
        $(impl KernelParam for $value {
            const TYPE: ParamType = ParamType::Value($name);
        })*
        $(impl PointerElement for $element {
            const C_TYPES: &'static [&'static str] = &[$($pointee),*];
        })*
    };
}

c_types! {
    i32 = "int", u32 = "u32", i64 = "i64", f32 = "float", f64 = "double", CUtensorMap = "TensorMap",;
    f32 = ["float"], f64 = ["double"], i64 = ["i64"], u32 = ["u32"], u64 = ["u64"], Bf16 = ["bf16"], E4m3 = ["e4m3"], CosSin = ["float2"],
    Element = ["float", "bf16", "T"], Stored = ["float", "bf16", "e4m3"], Word = ["u16", "u32", "uint4"],
}

/// A device address of elements of `T`; 0 stands for an absent operand.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct DevicePtr<T> {
    address: u64,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePtr<T> {}

impl<T> From<u64> for DevicePtr<T> {
    fn from(address: u64) -> Self {
        DevicePtr { address, element: PhantomData }
    }
}

impl<T> DevicePtr<T> {
    /// An absent operand.
    pub(crate) const NULL: DevicePtr<T> = DevicePtr { address: 0, element: PhantomData };
}

/// An element to which a [`DevicePtr`] may point, by the names of its type in CUDA source.
pub(crate) trait PointerElement {
    #[cfg_attr(not(test), allow(dead_code, reason = "read by a test"))]
    const C_TYPES: &'static [&'static str];
}

impl<T: PointerElement> KernelParam for DevicePtr<T> {
    const TYPE: ParamType = ParamType::Pointer(T::C_TYPES);
}

/// An element of bf16.
#[derive(Debug)]
pub(crate) enum Bf16 {}

/// An element of e4m3.
#[derive(Debug)]
pub(crate) enum E4m3 {}

/// A pair (cos, sin).
#[derive(Debug)]
pub(crate) enum CosSin {}

/// An f32 or a bf16: the kernel's name, or the macros that it is compiled with, say which.
#[derive(Debug)]
pub(crate) enum Element {}

/// An f32, a bf16 or an e4m3, which the kernel's name states.
#[derive(Debug)]
pub(crate) enum Stored {}

/// A word of 2, 4 or 16 bytes, which the kernel's name states.
#[derive(Debug)]
pub(crate) enum Word {}

/// A kernel of a loaded module, with the type of its parameters.
#[derive(Debug)]
pub(crate) struct LoadedKernel<P> {
    function: KernelFunction,
    params: PhantomData<fn(P)>,
}

impl<P: KernelParams> LoadedKernel<P> {
    pub(crate) fn new(module: &CudaModule, kernel: Kernel<P>) -> CudaResult<LoadedKernel<P>> {
        Ok(LoadedKernel { function: module.get_function(kernel.name)?, params: PhantomData })
    }

    /// Allows the kernel more dynamic shared memory than the default limit of 48 KiB.
    pub(crate) fn set_max_shared_bytes(&self, bytes: u32) -> CudaResult<()> {
        self.function.set_max_shared_bytes(bytes)
    }

    /// Launches the kernel with `threads` threads per block and `shared_bytes` bytes of dynamic
    /// shared memory.
    ///
    /// # Safety
    /// As [`CudaStream::launch_kernel`], except that the types of the arguments are checked.
    pub(crate) unsafe fn launch(
        &self,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        args: &P,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        // SAFETY: the arguments have the types that the kernel declares; the caller guarantees the
        // rest.
        unsafe { stream.launch_kernel(&self.function, grid, threads, shared_bytes, &mut args.addresses()) }
    }
}

/// Declares the parameters of kernels: a struct per signature, with the parameters' names in the CUDA
/// source, and a constant per kernel. `$table` lists all of them for the test that compares them with
/// the source.
macro_rules! kernel_signatures {
    (
        $table:ident:
        $(
            $(#[$doc:meta])*
            $params:ident { $($field:ident: $ty:ty),* $(,)? } = $($kernel:ident $name:literal),+;
        )*
    ) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy)]
            pub(crate) struct $params {
                $(pub(crate) $field: $ty,)*
            }

            #[allow(unsafe_code, reason = "the macro implements the trait as its contract says")]
            // SAFETY: one address per field, in the order in which the fields are declared.
            unsafe impl $crate::kernel_params::KernelParams for $params {
                fn addresses(&self) -> Vec<*mut ::std::ffi::c_void> {
                    vec![$($crate::kernel_params::argument_address(&self.$field)),*]
                }
            }

            #[cfg(test)]
            impl $params {
                const PARAMS: &'static [$crate::kernel_params::Param] =
                    &[$($crate::kernel_params::Param::new::<$ty>(stringify!($field))),*];
            }

            $(
                pub(crate) const $kernel: $crate::kernel_params::Kernel<$params> =
                    $crate::kernel_params::Kernel::new($name);
            )+
        )*

        /// The kernels of this table with their parameters.
        #[cfg(test)]
        pub(crate) const $table: &[(&str, &[$crate::kernel_params::Param])] = &[
            $($(($name, $params::PARAMS),)+)*
        ];
    };
}
pub(crate) use kernel_signatures;
