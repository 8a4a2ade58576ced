//! What the arbiter keeps of a guest, and the one rule by which it changes hands.
//!
//! An arbiter is a register that can be read, and replaced by whoever knows what is in it
//! (compare and swap). Nothing else is asked of it: no clock, no leases, no locks of its own.
//!
//! # Why no two hosts speak for a guest
//!
//! *One holder.* Every change is a swap of the version that the changer has judged, and a take
//! makes the term larger. So there is one holder of each term, and terms only grow.
//!
//! *By time.* The holder counts its lease from before it sent its last write. Somebody else counts
//! from after that write was seen, for as long and [`wait`] more, and only if nothing was written
//! meanwhile. As long as clocks differ by less than 1 % in rate the holder stops first.
//!
//! *By heirs.* The holder names the spares that may take the term. With `at_once` it promises
//! that nothing leaves its guest which not all of them have acknowledged. An heir then waits for
//! nothing: what the old holder may still say, the heir knows, and what the heir does from then on
//! the old holder does not hear of. To go on without an heir the holder first has it struck out,
//! by a swap, which either succeeds or finds the term taken. No clock is needed for that.
//!
//! A holder whose heirs acknowledge goes on for `grace_ns` without the arbiter. Only one who is no
//! heir, and starts the guest anew, has to wait for as long.

use std::collections::BTreeSet;

use hotspare_image::{NodeId, Term};

use crate::event::{Claim, Nanos};

/// What the arbiter keeps of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The newest term that was given to anybody.
    pub term: Term,
    /// To whom.
    pub holder: NodeId,
    /// For how long after each write the holder may speak.
    pub lease_ns: Nanos,
    /// And for how long while all heirs acknowledge.
    pub grace_ns: Nanos,
    /// Makes every write differ from the one before.
    pub renewals: u64,
    /// Spares that may take the term.
    pub heirs: BTreeSet<NodeId>,
    /// Nothing leaves the holder's guest that not all heirs have acknowledged.
    pub at_once: bool,
    /// Heirs wait for the lease all the same: what the guest does reaches others by more than its
    /// packets.
    pub shared: bool,
    /// The holder has stopped its guest for good.
    pub over: bool,
}

impl Record {
    /// For how long after this write the holder may go on if its heirs acknowledge.
    #[must_use]
    pub fn at_most_ns(&self) -> Nanos {
        match self.at_once && !self.shared && !self.heirs.is_empty() {
            true => self.grace_ns.max(self.lease_ns),
            false => self.lease_ns,
        }
    }
}

/// How a node writes its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Of [`Record::lease_ns`].
    pub lease_ns: Nanos,
    /// Of [`Record::grace_ns`].
    pub grace_ns: Nanos,
    /// Of [`Record::at_once`].
    pub at_once: bool,
    /// Of [`Record::shared`].
    pub shared: bool,
}

/// What somebody wants of the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// To reign in this term.
    Take {
        /// Which.
        term: Term,
        /// By what right.
        by: Claim,
    },
    /// To go on in this term, with these heirs.
    Keep {
        /// Which.
        term: Term,
        /// Whom.
        heirs: BTreeSet<NodeId>,
    },
    /// To reign no more.
    GiveUp {
        /// Which.
        term: Term,
        /// The guest has ended: nobody inherits it.
        ended: bool,
    },
}

/// What to do about a wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Put this in the place of what was judged.
    Write(Record),
    /// Somebody else reigns. It may be different from `retry_at` on, if nothing is written till
    /// then; `None`: not by waiting.
    Denied {
        /// The newest term.
        held: Term,
        /// When to ask again.
        retry_at: Option<Nanos>,
    },
    /// There is nothing to do.
    Done,
    /// The register has lost what was written there. Nobody can say who reigns.
    Forgotten,
}

/// For how long somebody else waits out a lease: 1 % and 10 ms more, for clocks that differ.
#[must_use]
pub fn wait(lease_ns: Nanos) -> Nanos {
    lease_ns.saturating_add(lease_ns / 100).saturating_add(10_000_000)
}

/// What to do about `wish` of `node` at `now`, given what the register holds and when that was
/// first seen there. The write must replace exactly that.
#[must_use]
pub fn judge(
    seen: Option<(&Record, Nanos)>,
    node: NodeId,
    terms: Terms,
    wish: &Wish,
    now: Nanos,
) -> Verdict {
    match wish {
        Wish::Take { term, by } => take(seen, node, terms, (*term, *by), now),
        Wish::Keep { term, heirs } => keep(seen, node, terms, *term, heirs),
        Wish::GiveUp { term, ended } => give_up(seen, node, *term, *ended),
    }
}

fn take(
    seen: Option<(&Record, Nanos)>,
    node: NodeId,
    terms: Terms,
    (term, by): (Term, Claim),
    now: Nanos,
) -> Verdict {
    let mut new = Record {
        term,
        holder: node,
        lease_ns: terms.lease_ns,
        grace_ns: terms.grace_ns,
        renewals: 0,
        heirs: BTreeSet::new(),
        at_once: terms.at_once,
        shared: terms.shared,
        over: false,
    };
    let Some((record, since)) = seen else {
        return if by == Claim::First { Verdict::Write(new) } else { Verdict::Forgotten };
    };
    let held = record.term;
    if term <= held && !crate::mutate::is(Mutation::OldTerm) {
        return Verdict::Denied { held, retry_at: Some(now) };
    }
    match right(record, since, node, by) {
        Right::Now => {}
        Right::From(at) if now >= at => {}
        Right::From(at) => return Verdict::Denied { held, retry_at: Some(at) },
        Right::Never => return Verdict::Denied { held, retry_at: None },
    }
    // Until the guest runs here others may be wanted to run it, from what they have.
    if by != Claim::First {
        new.heirs = record.heirs.iter().copied().filter(|heir| *heir != node).collect();
    }
    if let Claim::Offer(of) = by
        && of == held
    {
        // Whoever offers it may want it back.
        new.heirs.insert(record.holder);
    }
    new.at_once |= !new.heirs.is_empty();
    Verdict::Write(new)
}

enum Right {
    Now,
    From(Nanos),
    Never,
}

fn right(record: &Record, since: Nanos, node: NodeId, by: Claim) -> Right {
    let inherits = record.heirs.contains(&node) || crate::mutate::is(Mutation::NoHeir);
    let consents = match by {
        Claim::Word(of) | Claim::Offer(of) => of == record.term,
        Claim::First | Claim::Heir => false,
    };
    let lease_over = match crate::mutate::is(Mutation::NoWait) {
        true => since,
        false => since.saturating_add(wait(record.lease_ns)),
    };
    if record.holder == node {
        return Right::Now;
    }
    match by {
        Claim::Heir | Claim::Word(_) | Claim::Offer(_) if !inherits => Right::Never,
        Claim::Heir | Claim::Word(_) | Claim::Offer(_) => {
            match (record.at_once && !record.shared) || record.over || consents {
                true => Right::Now,
                false => Right::From(lease_over),
            }
        }
        Claim::First if record.over && record.heirs.is_empty() => Right::Now,
        Claim::First => {
            let most_over = since.saturating_add(wait(record.at_most_ns()));
            Right::From(if crate::mutate::is(Mutation::NoGrace) { lease_over } else { most_over })
        }
    }
}

fn keep(
    seen: Option<(&Record, Nanos)>,
    node: NodeId,
    terms: Terms,
    term: Term,
    heirs: &BTreeSet<NodeId>,
) -> Verdict {
    match seen {
        Some((record, _)) if record.term == term && record.holder == node && !record.over => {
            Verdict::Write(Record {
                renewals: record.renewals + 1,
                heirs: heirs.clone(),
                // Until it runs here, whoever offered the term may want it back.
                at_once: terms.at_once || (record.at_once && *heirs == record.heirs),
                lease_ns: terms.lease_ns,
                grace_ns: terms.grace_ns,
                shared: terms.shared,
                ..record.clone()
            })
        }
        Some((record, _)) if record.term > term => {
            Verdict::Denied { held: record.term, retry_at: None }
        }
        Some((record, _)) if record.term == term && record.holder == node => Verdict::Done,
        Some(_) | None => Verdict::Forgotten,
    }
}

fn give_up(seen: Option<(&Record, Nanos)>, node: NodeId, term: Term, ended: bool) -> Verdict {
    match seen {
        Some((record, _)) if (record.term, record.holder, record.over) == (term, node, false) => {
            let heirs = if ended { BTreeSet::new() } else { record.heirs.clone() };
            let renewals = record.renewals + 1;
            Verdict::Write(Record { renewals, heirs, over: true, ..record.clone() })
        }
        Some(_) | None => Verdict::Done,
    }
}

use crate::mutate::Mutation;
