//! Allocations that are refused before the operating system would end the process for them.

use tessera_base::{Bytes, Diagnostic};
use tessera_device::T0804;

/// The memory that a backend may still allocate; without a limit by default.
#[derive(Debug, Default)]
pub(crate) struct MemoryBudget {
    left_bytes: Option<u64>,
}

impl MemoryBudget {
    pub(crate) fn new(bytes: u64) -> MemoryBudget {
        MemoryBudget { left_bytes: Some(bytes) }
    }

    /// Reserves `bytes` bytes for `what`.
    ///
    /// # Errors
    /// T0804, with both numbers.
    pub(crate) fn reserve_bytes(&mut self, what: &str, bytes: u64) -> Result<(), Diagnostic> {
        let Some(left) = &mut self.left_bytes else { return Ok(()) };
        match left.checked_sub(bytes) {
            Some(rest) => {
                *left = rest;
                Ok(())
            }
            None => Err(self.build_refusal(what, bytes)),
        }
    }

    /// Returns the bytes of freed memory to the budget.
    pub(crate) fn give_back(&mut self, bytes: u64) {
        self.left_bytes = self.left_bytes.map(|left| left.saturating_add(bytes));
    }

    /// Allocates a tensor of zeros. All its pages are resident afterwards, so the host counts them.
    ///
    /// # Errors
    /// T0804 if the budget or the host does not have the memory.
    pub(crate) fn allocate_zeros(&mut self, what: &str, elements: u64) -> Result<Vec<f32>, Diagnostic> {
        let bytes = elements.saturating_mul(4);
        self.reserve_bytes(what, bytes)?;
        let mut values = Vec::new();
        let len = usize::try_from(elements).unwrap_or(usize::MAX);
        values.try_reserve_exact(len).map_err(|_| self.build_refusal(what, bytes))?;
        values.resize(len, 0.0);
        Ok(values)
    }

    fn build_refusal(&self, what: &str, bytes: u64) -> Diagnostic {
        let host = match self.left_bytes {
            None => "refuses the allocation".to_string(),
            Some(left) => format!("{left} bytes available"),
        };
        Diagnostic::error(&T0804, format!("{what} needs {}, which this host does not have", Bytes(bytes)))
            .with_label(what, format!("{bytes} bytes"))
            .with_label("this host", host)
            .with_hint("check the sizes in config.json and stream.toml, or use more hosts")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_beyond_the_host_is_refused_with_both_numbers() {
        let refused = |budget: &mut MemoryBudget, elements: u64| {
            let d = budget.allocate_zeros("buffer @kv", elements).unwrap_err();
            assert_eq!(d.code.id, "T0804");
            format!("{d:?}")
        };
        for elements in [1 << 62, u64::MAX] {
            assert!(refused(&mut MemoryBudget::default(), elements).contains("buffer @kv"));
        }
        let mut budget = MemoryBudget::new(100);
        assert_eq!(budget.allocate_zeros("a small one", 5), Ok(vec![0.0; 5]));
        let text = refused(&mut budget, 21);
        assert!(text.contains("84 bytes") && text.contains("80 bytes available"), "{text}");
        assert_eq!(budget.allocate_zeros("the rest", 20), Ok(vec![0.0; 20]));
        assert!(budget.reserve_bytes("one byte", 1).is_err());
        budget.give_back(1);
        assert!(budget.reserve_bytes("one byte", 1).is_ok());
    }
}
