//! SIMD support: selects the widest vector unit at run time, compiles each loop once per unit, and
//! contains the few functions with hand-written intrinsics. All `unsafe` code of the kernels is in
//! this module.

#![allow(unsafe_code)]

mod math;
mod tile;

pub(crate) use math::{exp, gelu_tanh, sum_lanes};
pub use math::{relu, silu, soft_clamp};
pub(crate) use tile::{
    AccumulatorTile, BLOCK, LhsOperand, OutputTile, PANEL, RhsPanel, TILE_ROWS, multiply_tile, pack_panel,
};

/// A SIMD level that this build supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// AVX-512 F, BW, DQ and VL: 32 registers of 16 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 and FMA: 16 registers of 8 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The target's baseline instruction set.
    Portable,
}

impl Level {
    /// Returns the name of the level, as in lists of CPU features.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            Level::Portable => "portable",
        }
    }
}

/// Returns the widest SIMD level of this machine. The standard library caches the answer.
#[inline]
pub(crate) fn level() -> Level {
    #[cfg(test)]
    if let Some(level) = TEST_LEVEL.get() {
        return level;
    }
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            return Level::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Level::Avx2;
        }
    }
    Level::Portable
}

#[cfg(test)]
thread_local! {
    /// The level that a test selected for this thread.
    static TEST_LEVEL: std::cell::Cell<Option<Level>> = const { std::cell::Cell::new(None) };
}

/// Returns every SIMD level of this machine.
#[cfg(test)]
pub(crate) fn levels() -> Vec<Level> {
    let mut all = vec![Level::Portable];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            all.push(Level::Avx2);
        }
        if level() == Level::Avx512 {
            all.push(Level::Avx512);
        }
    }
    all
}

/// Runs `f` with this thread's loops on one of [`levels`].
#[cfg(test)]
pub(crate) fn with_level<R>(level: Level, f: impl FnOnce() -> R) -> R {
    TEST_LEVEL.set(Some(level));
    let result = f();
    TEST_LEVEL.set(None);
    result
}

/// Defines a function whose body is compiled for each SIMD level and selected at run time.
///
/// The loops inside must fix their own order of additions (see [`sum_lanes`]); the compiler never
/// reorders float arithmetic, so all versions give the same bits.
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident$(<$f:ident: $bound:path>)?($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code, clippy::too_many_arguments)]
        $vis fn $name$(<$f: $bound>)?($($arg: $ty),*) {
            #[inline(always)]
            fn body$(<$f: $bound>)?($($arg: $ty),*) $body
            /// # Safety
            ///
            /// The processor must have the features of `Level::Avx512`.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512$(<$f: $bound>)?($($arg: $ty),*) {
                body($($arg),*)
            }
            /// # Safety
            ///
            /// The processor must have the features of `Level::Avx2`.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2$(<$f: $bound>)?($($arg: $ty),*) {
                body($($arg),*)
            }
            match $crate::simd::level() {
                // SAFETY: `level` has just detected these features on this machine.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Level::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Level::Avx2 => unsafe { avx2($($arg),*) },
                $crate::simd::Level::Portable => body($($arg),*),
            }
        }
    };
}
pub(crate) use vectorized;

/// A growing buffer whose slices start on a cache line, so that no vector load straddles two lines.
#[derive(Debug, Default, Clone)]
pub(crate) struct AlignedBuffer {
    data: Vec<f32>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// Returns the first `len` elements, growing the buffer if needed; their content is
    /// unspecified.
    pub(crate) fn ensure_len(&mut self, len: usize) -> &mut [f32] {
        if self.data.len() < len + 16 {
            self.data = vec![0.0; len + 16];
            // 64 bytes are 16 elements. `align_offset` may give up, because alignment only affects
            // speed.
            self.start = self.data.as_ptr().align_offset(64).min(16);
        }
        self.len = len;
        &mut self.data[self.start..self.start + len]
    }

    /// Returns the bytes of the allocation.
    pub(crate) fn allocated_bytes(&self) -> usize {
        self.data.capacity() * size_of::<f32>()
    }

    /// Returns the slice of the last [`ensure_len`](AlignedBuffer::ensure_len).
    pub(crate) fn get(&self) -> &[f32] {
        &self.data[self.start..self.start + self.len]
    }

    /// Returns the slice of [`AlignedBuffer::get`], mutably.
    pub(crate) fn get_mut(&mut self) -> &mut [f32] {
        &mut self.data[self.start..self.start + self.len]
    }
}
