//! Enums whose values have a name in files, on the command line and in reports.

/// Defines an enum of values with names: `pub enum Transport { Best = "best", Nccl = "nccl", }`.
/// The enum is `Copy`, ordered by declaration, and has `ALL`, `name` and `from_name`.
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$value_meta:meta])* $value:ident = $word:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$value_meta])* $value,)+ }

        impl $name {
            /// All values, in declaration order.
            pub const ALL: [$name; [$($word),+].len()] = [$($name::$value),+];

            /// Returns the name of the value in files, on the command line and in reports.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $($name::$value => $word,)+ }
            }

            /// Returns the value with this name, or `None` for a name that no value has.
            #[must_use]
            pub fn from_name(name: &str) -> Option<$name> {
                $name::ALL.into_iter().find(|value| value.name() == name)
            }
        }
    };
}
