//! The flags that several verbs share: one file for each set, and one row for each flag.

/// Declares a set of flags: the struct that clap parses, and which of its flags are given.
///
/// A row is the whole flag: the group of requests that it belongs to, its help, its clap attributes
/// and its type. A list of names beside the struct would have to be kept equal by hand.
macro_rules! flag_set {
    ($(#[$set_attr:meta])* $set:ident by $group:ident {
        $([$variant:ident] $(#[$attr:meta])* $flag:ident: $ty:ty,)*
    }) => {
        #[derive(Debug, Clone, clap::Args)]
        $(#[$set_attr])*
        pub struct $set {
            $($(#[$attr])* pub $flag: $ty,)*
        }

        impl $set {
            /// Returns the flags of these groups that are given, in the order of the help text.
            pub fn given_flags(&self, groups: &[$group]) -> Vec<String> {
                let flags = [$((
                    stringify!($flag),
                    $group::$variant,
                    $crate::flags::FlagField::is_given(&self.$flag),
                )),*];
                let given = flags.into_iter().filter(|(_, group, given)| *given && groups.contains(group));
                given.map(|(id, ..)| $crate::flags::flag_name::<Self>(id)).collect()
            }
        }
    };
}

pub mod encoders;
pub mod mapping;
pub mod search;
pub mod video;

pub(crate) use flag_set;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// The requests to which a flag applies; it is rejected in all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AppliesTo {
    /// Every request
    AnyRequest,
    /// A video model
    VideoModels,
    /// A language model
    LanguageModels,
    /// A run on a simulated cluster
    Simulation,
    /// A rank that another launcher started
    JoinedRanks,
}

/// The type of a flag's field.
pub trait FlagField {
    /// Returns whether the flag is on the command line.
    fn is_given(&self) -> bool;
}

impl FlagField for bool {
    fn is_given(&self) -> bool {
        *self
    }
}

impl<T> FlagField for Option<T> {
    fn is_given(&self) -> bool {
        self.is_some()
    }
}

/// Returns a flag of a set as it is written, given the id of its argument.
pub fn flag_name<Set: clap::Args>(id: &str) -> String {
    let command = Set::augment_args(clap::Command::new("flags"));
    let long = command.get_arguments().find(|a| a.get_id() == id).and_then(clap::Arg::get_long);
    format!("--{}", long.unwrap_or(id))
}

/// Parses the values of a flag by name. A row is the name, the value and its help text.
///
/// A `clap::ValueEnum` would need a second enum here, because the enums that mappings consist of
/// belong to crates that do not know clap.
pub fn named_values<T: Copy + Send + Sync + 'static>(
    rows: &'static [(&'static str, T, &'static str)],
) -> impl TypedValueParser<Value = T> {
    let values = rows.iter().map(|(name, _, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values).try_map(move |given| {
        let row = rows.iter().find(|(name, ..)| *name == given);
        row.map(|(_, value, _)| *value).ok_or_else(|| format!("no value `{given}`"))
    })
}
