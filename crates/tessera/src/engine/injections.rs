//! The faults that drills inject into the engine and the memory of a rank. Outside of drills nothing calls
//! them.

use std::collections::BTreeSet;

use super::MeshEngine;

impl MeshEngine {
    /// Makes the backend capture every program into a graph that no plan declares (a fault for
    /// drills).
    pub(crate) fn inject_undeclared_graph(&mut self) {
        self.backend.rename_graphs("undeclared");
    }

    /// Overwrites one element of a weight in memory without updating its fingerprint. Only drills
    /// use this fault. Returns `false` if the element does not exist.
    pub fn mutate_weight(&mut self, name: &str, index: u64, value: f32) -> bool {
        self.backend.write_weight(name, index, value)
    }

    /// Flips one bit of one element of a weight in memory; `draw` selects weight, element and bit.
    /// Returns the name of the weight, or `None` if the backend reads no single elements. Only
    /// the campaign of faults uses this fault.
    pub(crate) fn flip_weight_bit(&mut self, draw: [u32; 3]) -> Option<String> {
        // Tables that kernels derive from constants have fingerprints and no elements.
        let names = self.backend.fingerprints().into_iter().map(|print| print.tensor);
        let names: BTreeSet<String> =
            names.filter(|name| self.backend.read_weight(name, 0).is_some()).collect();
        let name = names.iter().nth(draw[0] as usize % names.len().max(1))?;
        // The number of elements is the first index that the backend cannot read.
        let (mut elements, mut beyond) = (0, u64::from(u32::MAX));
        while elements < beyond {
            let middle = elements.midpoint(beyond);
            match self.backend.read_weight(name, middle) {
                Some(_) => elements = middle + 1,
                None => beyond = middle,
            }
        }
        let index = u64::from(draw[1]) % elements.max(1);
        let value = self.backend.read_weight(name, index)?;
        let flipped = f32::from_bits(value.to_bits() ^ (1 << (draw[2] % 32)));
        self.backend.write_weight(name, index, flipped).then(|| name.clone())
    }

    /// Flips one bit of one element of a cache in memory; `draw` selects cache, element and bit.
    /// Returns the name of the cache, or `None` if this rank holds none. Only the campaign of
    /// faults uses this fault.
    pub(crate) fn flip_cache_bit(&mut self, draw: [u32; 3]) -> Option<String> {
        let caches = self.caches.slices();
        let name = caches.keys().nth(draw[0] as usize % caches.len().max(1))?;
        let mut values = self.backend.read_buffer(name)?;
        let index = draw[1] as usize % values.len().max(1);
        let value = values.get_mut(index)?;
        *value = f32::from_bits(value.to_bits() ^ (1 << (draw[2] % 32)));
        self.backend.write_buffer(name, &values).then(|| name.clone())
    }

    /// Makes every later run begin with work that never ends (a fault for drills). Returns if the
    /// backend executes its own work; a backend that works on the calling thread hangs here, from
    /// now on.
    pub(crate) fn inject_hang(&mut self) {
        while !self.backend.inject_hang() {
            std::hint::spin_loop();
        }
    }

    /// Fills the caches whose names begin with `prefix` with zeros, as a reset does. Returns `false` if
    /// none held anything else.
    pub(crate) fn clear_caches(&mut self, prefix: &str) -> bool {
        let mut cleared = false;
        for name in self.caches.slices().keys().filter(|name| name.starts_with(prefix)) {
            let Some(mut values) = self.backend.read_buffer(name) else { continue };
            if values.iter().any(|x| x.to_bits() != 0) {
                values.fill(0.0);
                cleared |= self.backend.write_buffer(name, &values);
            }
        }
        cleared
    }

    /// Empties all caches behind the back of the runtime.
    pub(crate) fn lose_caches(&mut self) {
        self.backend.reset_buffers();
    }

    /// Makes the rows above and below the shard arrive swapped in every later halo exchange. Returns
    /// `false` if the backend exchanges no halos.
    pub(crate) fn swap_halos(&mut self) -> bool {
        self.backend.swap_halos()
    }
}
