//! Other places that have packs of a store: a copy of it, or an agent that still has in memory
//! what it wrote.
//!
//! Who asks has the manifests, with a hash of each block. So nobody has to be believed: what is
//! not as it should be is asked of the next.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::bucket::{Bucket, Parts};
use crate::error::{StoreError, StoreResult};

/// How long somebody who failed is not asked again, as long as others answer.
const PENANCE: Duration = Duration::from_secs(10);

/// Has packs of a store, all or some.
pub trait PackSource: Send + Sync {
    /// The bytes of ranges of objects, in the order of `wanted`. [`StoreError::Missing`] if it has
    /// not all of them, which is no failure.
    fn parts(&self, wanted: &[(String, Vec<Range<u64>>)]) -> StoreResult<Vec<Parts>>;

    /// What people call it.
    fn place(&self) -> String;
}

impl PackSource for Bucket {
    fn parts(&self, wanted: &[(String, Vec<Range<u64>>)]) -> StoreResult<Vec<Parts>> {
        self.get_parts(wanted)
    }

    fn place(&self) -> String {
        format!("{self:?}")
    }
}

/// Somebody who is asked before the store itself.
pub(crate) struct Nearby {
    pub(crate) source: Box<dyn PackSource>,
    failed: Mutex<Option<Instant>>,
}

impl fmt::Debug for Nearby {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source.place())
    }
}

impl Nearby {
    pub(crate) fn new(source: Box<dyn PackSource>) -> Self {
        Self { source, failed: Mutex::default() }
    }

    /// Whether it is worth asking.
    pub(crate) fn is_good(&self) -> bool {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.is_none_or(|failed| failed.elapsed() > PENANCE)
    }

    /// It did not give what was asked for.
    pub(crate) fn failed(&self, error: &StoreError) {
        if matches!(error, StoreError::Missing(_)) {
            return;
        }
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.replace(Instant::now()).is_none() {
            let place = self.source.place();
            tracing::error!(%error, "pages are asked of others, for they cannot be had of {place}");
        }
    }
}

/// Packs that were written lately, in memory.
#[derive(Debug)]
pub struct PackMemory {
    most: u64,
    held: Mutex<HeldPacks>,
}

#[derive(Debug, Default)]
struct HeldPacks {
    packs: BTreeMap<String, Arc<Vec<u8>>>,
    /// The oldest first; some may have gone.
    order: VecDeque<String>,
    bytes: u64,
}

impl HeldPacks {
    fn drop_pack(&mut self, name: &str) {
        if let Some(gone) = self.packs.remove(name) {
            self.bytes -= gone.len() as u64;
        }
    }
}

impl PackMemory {
    /// For so many bytes; then the oldest go.
    #[must_use]
    pub fn new(most: u64) -> Self {
        Self { most, held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, HeldPacks> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keep(&self, name: &str, bytes: Vec<u8>) {
        let mut held = self.held();
        held.drop_pack(name);
        held.order.retain(|other| other != name);
        held.bytes += bytes.len() as u64;
        held.packs.insert(name.to_owned(), Arc::new(bytes));
        held.order.push_back(name.to_owned());
        while held.bytes > self.most {
            let Some(oldest) = held.order.pop_front() else { break };
            held.drop_pack(&oldest);
        }
    }

    pub(crate) fn forget(&self, name: &str) {
        let mut held = self.held();
        held.drop_pack(name);
        held.order.retain(|other| other != name);
    }

    #[cfg(test)]
    fn bytes(&self) -> u64 {
        self.held().bytes
    }

    /// Some bytes of a pack; none if it is not here, or ends before.
    #[must_use]
    pub fn part(&self, name: &str, range: Range<u64>) -> Option<Vec<u8>> {
        let pack = self.held().packs.get(name).cloned()?;
        let range = usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?;
        pack.get(range).map(<[u8]>::to_vec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_packs_go_when_there_is_no_more_room() {
        let memory = PackMemory::new(10);
        memory.keep("a", vec![1; 4]);
        memory.keep("b", vec![2; 4]);
        assert_eq!(memory.part("a", 1..3), Some(vec![1; 2]));
        memory.keep("c", vec![3; 4]);
        assert_eq!((memory.part("a", 0..1), memory.bytes()), (None, 8));
        memory.keep("b", vec![4; 6]);
        assert_eq!((memory.part("b", 5..6), memory.part("b", 5..7)), (Some(vec![4]), None));
        assert_eq!(memory.bytes(), 10);
        memory.forget("b");
        assert_eq!((memory.part("b", 0..1), memory.bytes()), (None, 4));
        memory.keep("d", vec![5; 11]);
        assert_eq!(memory.bytes(), 0, "what is too large is not kept at the cost of all else");
    }
}
