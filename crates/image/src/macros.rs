//! The macro behind every numeric name of this crate.

/// Declares a number with a meaning: a newtype with CBOR coding, ordering and `Display`.
#[macro_export]
macro_rules! numeric_name {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
            minicbor::Encode, minicbor::Decode,
        )]
        #[cbor(transparent)]
        pub struct $name(#[n(0)] pub $inner);

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}
