//! The numbers that order everything: who reigns, which node, how far a checkpoint or a log has
//! come.

use core::fmt;

use minicbor::{Decode, Encode};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode,
        )]
        #[cbor(transparent)]
        pub struct $name(#[n(0)] pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

number!(
    /// Number of a checkpoint: checkpoint *n* ends epoch *n*. The first checkpoint of a reign
    /// follows the last one the reign before committed; epoch 0 means "nothing yet".
    Epoch, "e"
);
number!(
    /// Number of a logged event within its epoch, for `replay`. Always 0 under `timeline`.
    EventIndex, "v"
);
number!(
    /// Number of a reign. A primary of an older term has no say (fencing token). Term 0 means
    /// "no reign yet".
    Term, "t"
);
number!(
    /// A host that takes part, chosen at random when its agent starts for the first time.
    NodeId, "n"
);

impl Epoch {
    /// The epoch after this one.
    #[must_use]
    pub fn next(self) -> Epoch {
        Epoch(self.0.checked_add(1).expect("2^64 epochs"))
    }
}

impl Term {
    /// The term after this one.
    #[must_use]
    pub fn next(self) -> Term {
        Term(self.0.checked_add(1).expect("2^64 terms"))
    }
}

/// How far the guest's history goes: all of the epochs up to `epoch`, then the first `event`
/// logged events after that checkpoint. Ordered by epoch, then event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(array)]
pub struct Position {
    /// The last checkpoint included.
    #[n(0)]
    pub epoch: Epoch,
    /// How many logged events after that checkpoint are included.
    #[n(1)]
    pub event: EventIndex,
}

impl Position {
    /// Exactly the checkpoint that ends `epoch`, with no event after it.
    #[must_use]
    pub fn checkpoint(epoch: Epoch) -> Position {
        Position { epoch, event: EventIndex(0) }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_order_by_epoch_then_event() {
        let at = |epoch, event| Position { epoch: Epoch(epoch), event: EventIndex(event) };
        assert!(at(1, 9) < at(2, 0));
        assert!(at(2, 0) < at(2, 1));
        assert_eq!(at(2, 1).to_string(), "e2.v1");
    }

    #[test]
    fn a_position_survives_its_encoding() {
        let position = Position { epoch: Epoch(u64::MAX), event: EventIndex(7) };
        let bytes = minicbor::to_vec(position).unwrap();
        assert_eq!(minicbor::decode::<Position>(&bytes).unwrap(), position);
    }
}
