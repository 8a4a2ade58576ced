//! Which checkpoints are kept, and when a chain is too long. Decides, does nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::names::{Base, Name};
use crate::reader::Catalogue;

/// Checkpoints that a chain may have, the whole one apart, without a second thought …
const CHAIN_LONG: usize = 120;
/// … and at most. Folding reads and writes all of the guest's memory: not for little.
const CHAIN_MAX: usize = 720;
/// A chain that is so long is ended by whoever can.
const CHAIN_END: usize = 2 * CHAIN_MAX;

/// What is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// All that are younger.
    pub younger: Duration,
    /// And so many of the last ones, however old.
    pub last: usize,
}

impl Default for Keep {
    fn default() -> Self {
        Self { younger: Duration::from_secs(24 * 3600), last: 10 }
    }
}

impl Keep {
    /// What may be deleted, in an order in which nothing that is there ever lacks what it stands
    /// on.
    #[must_use]
    pub fn unwanted(&self, catalogue: &Catalogue, now_ms: u64) -> Vec<Name> {
        let names = catalogue.names();
        let oldest = now_ms.saturating_sub(self.younger.as_millis() as u64);
        // The same epoch may be there twice, once whole: it counts once.
        let mut points: Vec<(u64, u64, u64)> =
            names.iter().map(|name| (name.reign, name.epoch, name.time_ms)).collect();
        points.sort_unstable();
        points.dedup();
        let from = points.len().saturating_sub(self.last.max(1));
        let wanted = points
            .iter()
            .enumerate()
            .filter(|(at, (_, _, time_ms))| *at >= from || *time_ms >= oldest);
        let (mut needed, mut broken) = (BTreeSet::new(), BTreeSet::new());
        for (_, &(reign, epoch, _)) in wanted {
            match chain_to(catalogue, &needed, reign, epoch) {
                Some(chain) => needed.extend(chain),
                // It cannot be restored, and is no reason to delete what might explain it.
                None => drop(broken.insert((reign, epoch))),
            }
        }
        needed.extend(names.iter().filter(|n| broken.contains(&(n.reign, n.epoch))));
        let mut unwanted: Vec<Name> =
            names.iter().filter(|name| !needed.contains(name)).copied().collect();
        // From the end of each chain, and before the whole one that it began with.
        unwanted.sort_by_key(|name| {
            std::cmp::Reverse((name.reign, name.epoch, name.base != Base::Whole))
        });
        unwanted
    }
}

/// What a checkpoint needs that is not known to be needed, with all that it stands on. A day of
/// checkpoints has thousands with chains of hundreds: each link is looked at once.
fn chain_to(
    catalogue: &Catalogue,
    needed: &BTreeSet<Name>,
    reign: u64,
    epoch: u64,
) -> Option<Vec<Name>> {
    let (mut chain, mut at) = (Vec::new(), epoch);
    loop {
        let name = catalogue.named(reign, at)?;
        if needed.contains(&name) {
            return Some(chain);
        }
        chain.push(name);
        match name.base {
            Base::Whole => return Some(chain),
            Base::Epoch(before) => at = before,
        }
    }
}

/// Whether a restart from this chain reads so much more than it needs, or so many objects, that
/// it is worth folding.
pub(crate) fn is_long(chain: &[Name]) -> bool {
    let Some((whole, rest)) = chain.split_first() else { return false };
    let bytes: u64 = rest.iter().map(|name| name.bytes).sum();
    rest.len() > CHAIN_MAX
        || (rest.len() > CHAIN_LONG && bytes > whole.bytes / 8)
        || (rest.len() > 8 && bytes > whole.bytes.saturating_mul(2))
}

/// Whether it should have been folded long ago.
pub(crate) fn is_very_long(chain: &[Name]) -> bool {
    let Some((whole, rest)) = chain.split_first() else { return false };
    let bytes: u64 = rest.iter().map(|name| name.bytes).sum();
    rest.len() > CHAIN_END || (rest.len() > 16 && bytes > whole.bytes.saturating_mul(4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(reign: u64, epoch: u64, base: Base) -> Name {
        Name { reign, epoch, base, time_ms: epoch * 1000, bytes: 10 }
    }

    #[test]
    fn what_a_kept_one_stands_on_is_kept() {
        let mut names = vec![name(1, 1, Base::Whole)];
        names.extend((2..10).map(|epoch| name(1, epoch, Base::Epoch(epoch - 1))));
        let keep = Keep { younger: Duration::ZERO, last: 1 };
        let unwanted = |names: &[Name]| {
            let catalogue = Catalogue::of(names.to_vec());
            keep.unwanted(&catalogue, 1_000_000)
        };
        assert_eq!(unwanted(&names), []);
        // Folded at 5: all before that can go, and the one that was folded.
        names.push(name(1, 5, Base::Whole));
        let gone: Vec<_> = unwanted(&names).iter().map(|name| name.epoch).collect();
        assert_eq!(gone, [5, 4, 3, 2, 1]);
        names.push(name(2, 1, Base::Whole));
        assert_eq!(unwanted(&names).len(), names.len() - 1);
    }

    /// `--keep 24h --store-every 5s`: as whole chains, searched, that would be 10^11 comparisons.
    #[test]
    fn a_day_of_checkpoints_is_looked_at_link_by_link() {
        let mut names = Vec::new();
        for epoch in 1..=17_280 {
            let base = if epoch % 720 == 1 { Base::Whole } else { Base::Epoch(epoch - 1) };
            names.push(name(1, epoch, base));
        }
        let catalogue = Catalogue::of(names);
        let keep = Keep { younger: Duration::from_secs(10_000), last: 10 };
        let unwanted = keep.unwanted(&catalogue, 17_280_000);
        // The oldest kept one is of second 7,280, and stands on the whole one of 7,201.
        assert_eq!(unwanted.len(), 7_200);
    }

    proptest! {
        #[test]
        fn whatever_goes_the_wanted_ones_can_be_restored_at_each_step(
            steps in prop::collection::vec((0u8..4, any::<bool>()), 1..60),
            last in 1usize..6,
            younger in 0u64..40,
        ) {
            let mut names: Vec<Name> = Vec::new();
            let (mut reign, mut epoch, mut standing) = (1, 0, None);
            for (kind, fold) in steps {
                epoch += 1;
                if kind == 0 {
                    reign += 1;
                    standing = None;
                }
                let base = match standing {
                    Some(before) if kind != 1 => Base::Epoch(before),
                    _ => Base::Whole,
                };
                names.push(name(reign, epoch, base));
                if fold && base != Base::Whole {
                    names.push(name(reign, epoch, Base::Whole));
                }
                standing = Some(epoch);
            }
            let keep = Keep { younger: Duration::from_secs(younger), last };
            let now_ms = epoch * 1000;
            let mut catalogue = Catalogue::of(names.clone());
            let points: BTreeSet<(u64, u64)> = names.iter().map(|n| (n.reign, n.epoch)).collect();
            let wanted: Vec<(u64, u64)> = points
                .iter()
                .rev()
                .enumerate()
                .filter(|(at, (_, e))| {
                    *at < last || e * 1000 >= now_ms.saturating_sub(younger * 1000)
                })
                .map(|(_, point)| *point)
                .collect();
            for gone in keep.unwanted(&catalogue, now_ms) {
                catalogue.remove(gone);
                for (reign, epoch) in &wanted {
                    prop_assert!(catalogue.chain(*reign, *epoch).is_some());
                }
                // Nothing is left that stands on nothing.
                for left in catalogue.names() {
                    prop_assert!(catalogue.chain(left.reign, left.epoch).is_some(), "{:?}", left);
                }
            }
            prop_assert!(keep.unwanted(&catalogue, now_ms).is_empty());
        }
    }
}
