//! The verdict of a gate, for plans, runs and pages alike.

use crate::named_enum;

named_enum! {
    /// How the value of a gate compares with its limit.
    pub enum GateStatus {
        /// The value meets the limit, which is a minimum or a maximum.
        Pass = "pass",
        /// The value misses what the gate advises, such as a range of capacities, but no hard limit.
        Warn = "warn",
        /// The value is above a maximum or below a minimum.
        Fail = "fail",
        /// The gate has no subject: the plan or the run holds nothing that it could concern.
        NotApplicable = "n/a",
        /// The gate concerns the run, but the run holds too little for a value. The gate is withheld
        /// and does not pass.
        NotMeasured = "not measured",
    }
}
