//! The checks of stored state that a backend offers.

use std::fmt;

/// Which checks of the caches a backend offers, beside the count of resets that every backend keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheChecks {
    /// Digests of buffers where they are stored ([`crate::Backend::digest_buffers`]).
    pub contents: bool,
    /// Comparison of every halo with digests of the rows that its neighbours sent
    /// ([`crate::Observer::on_other_halo`]).
    pub halos: bool,
}

impl fmt::Display for CacheChecks {
    /// Prints `resets, contents, halos`, or `resets; not available: contents, halos`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let optional = [("contents", self.contents), ("halos", self.halos)];
        let names = |offered: bool| optional.iter().filter(move |c| c.1 == offered).map(|c| c.0);
        f.write_str("resets")?;
        names(true).try_for_each(|name| write!(f, ", {name}"))?;
        let missing: Vec<&str> = names(false).collect();
        if missing.is_empty() { Ok(()) } else { write!(f, "; not available: {}", missing.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_that_a_backend_lacks_are_named() {
        let all = CacheChecks { contents: true, halos: true };
        assert_eq!(all.to_string(), "resets, contents, halos");
        assert_eq!(CacheChecks { halos: false, ..all }.to_string(), "resets, contents; not available: halos");
        assert_eq!(CacheChecks::default().to_string(), "resets; not available: contents, halos");
    }
}
