//! Newtypes for quantities that must not be mixed up.

use std::fmt;
use std::ops::{Add, AddAssign};

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
        pub struct $name(pub u64);

        impl Add for $name {
            type Output = $name;
            fn add(self, other: $name) -> $name {
                $name(self.0 + other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                self.0 += other.0;
            }
        }
        impl std::iter::Sum for $name {
            fn sum<I: Iterator<Item = $name>>(iter: I) -> $name {
                $name(iter.map(|x| x.0).sum())
            }
        }
    };
}

quantity!(
    /// A number of bytes of memory or traffic.
    Bytes
);
quantity!(
    /// A number of floating-point operations; a multiply-add counts as two.
    Flops
);
quantity!(
    /// A duration or a point in time of some clock, in nanoseconds.
    Nanoseconds
);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = self.0 as f64;
        match self.0 {
            0..1024 => write!(f, "{} B", self.0),
            1024..1_048_576 => write!(f, "{:.1} KiB", b / 1024.0),
            1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", b / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", b / 1_073_741_824.0),
        }
    }
}

impl fmt::Display for Flops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let x = self.0 as f64;
        match self.0 {
            0..1_000_000 => write!(f, "{} flop", self.0),
            1_000_000..1_000_000_000 => write!(f, "{:.1} Mflop", x / 1e6),
            1_000_000_000..1_000_000_000_000 => write!(f, "{:.2} Gflop", x / 1e9),
            _ => write!(f, "{:.2} Tflop", x / 1e12),
        }
    }
}

impl fmt::Display for Nanoseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = self.0 as f64;
        match self.0 {
            0..1_000 => write!(f, "{} ns", self.0),
            1_000..1_000_000 => write!(f, "{:.1} µs", t / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} ms", t / 1e6),
            _ => write!(f, "{:.2} s", t / 1e9),
        }
    }
}
