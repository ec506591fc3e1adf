//! The units in which stacks of matrices are hashed: rows that a packed matrix unpacks at once. A weight whose experts lie in two
//! tiers of memory has the same units as a packed one, so that their digests are equal.

use crate::kernels::UNPACK_ROWS;

/// Returns the number of units of a matrix with so many rows.
pub(super) fn units_of_rows(rows: usize) -> usize {
    rows.div_ceil(UNPACK_ROWS).max(1)
}

/// Returns the matrix of a unit, where each has so many units, and the unit's first row in it.
pub(super) fn locate_unit(units: usize, unit: usize) -> (usize, usize) {
    (unit / units, unit % units * UNPACK_ROWS)
}
