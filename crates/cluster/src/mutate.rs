//! Rules broken on purpose, one at a time, to see that the simulation notices. Only in builds with
//! the feature `mutate`, which nothing but that test asks for.

/// A rule that can be broken.
#[cfg_attr(not(feature = "mutate"), expect(dead_code, reason = "only tests break rules"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// The register gives a term that is not newer than all before.
    OldTerm,
    /// The register gives the term before the lease has run out.
    NoWait,
    /// The register gives the term to a spare that has been struck out.
    NoHeir,
    /// The register does not wait for a holder whose heirs acknowledge.
    NoGrace,
    /// A primary does not stop its guest when its lease is over.
    NoExpiry,
    /// A gate lets output go after the lease. (A rule of `net::gate`; the simulation has its own.)
    NoLease,
    /// A gate lets output go before spares have acknowledged it. (As before.)
    NoCommit,
    /// A gate opens although a spare is not struck out yet. (As before.)
    NoStrike,
    /// A primary that hears of a newer reign goes on.
    NoDeposition,
    /// A spare claims a term that is not newer than all it knows.
    StaleClaim,
    /// A spare takes over whose ghost is not complete.
    AnyGhost,
    /// A spare may take over that does not have all that was shown before output waited for it.
    EarlyHeir,
}

#[cfg(feature = "mutate")]
thread_local! {
    static BROKEN: std::cell::Cell<Option<Mutation>> = const { std::cell::Cell::new(None) };
}

/// Breaks a rule on this thread, or none.
#[cfg(feature = "mutate")]
pub fn set(mutation: Option<Mutation>) {
    BROKEN.set(mutation);
}

/// Whether this rule is broken.
#[cfg(feature = "mutate")]
pub fn is(mutation: Mutation) -> bool {
    BROKEN.get() == Some(mutation)
}

/// Whether this rule is broken.
#[cfg(not(feature = "mutate"))]
pub(crate) const fn is(_: Mutation) -> bool {
    false
}
