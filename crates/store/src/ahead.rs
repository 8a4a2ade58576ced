//! Blocks that will be asked for soon, fetched before anybody asks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use hotspare_image::SharedBytes;

use crate::chain::{BlockId, Chain};
use crate::error::StoreResult;

/// No more than this is fetched ahead, unpacked: it stays in memory.
const AHEAD_BYTES_MAX: u64 = 16 << 20;
/// Unpacked bytes that one thread fetches.
const GROUP_BYTES: u64 = 2 << 20;

/// What has been fetched ahead, or is on its way.
#[derive(Debug, Default)]
pub(crate) struct Ahead(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// `None`: on its way. What could not be had is not here any more.
    blocks: Mutex<BTreeMap<BlockId, Option<SharedBytes>>>,
    changed: Condvar,
}

impl Shared {
    fn blocks(&self) -> MutexGuard<'_, BTreeMap<BlockId, Option<SharedBytes>>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a thread fetches. What has not come when it ends, for whatever reason, is waited for by
/// nobody.
struct UnderWay {
    shared: Arc<Shared>,
    ids: Vec<BlockId>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut blocks = self.shared.blocks();
        for id in &self.ids {
            if blocks.get(id).is_some_and(Option::is_none) {
                blocks.remove(id);
            }
        }
        self.shared.changed.notify_all();
    }
}

impl Ahead {
    /// Fetches blocks on threads of its own; as many as there is room for, from the first on. If
    /// that fails, readers fetch for themselves, and find out why.
    pub(crate) fn begin(chain: &Arc<Chain>, wanted: &[BlockId]) -> Self {
        let ahead = Self::default();
        let raw = |id: &BlockId| u64::from(chain.block(*id).1.raw);
        for ids in groups(wanted, raw) {
            let chain = chain.clone();
            ahead.fetch(ids, move |ids| {
                let blocks: Vec<_> = ids.iter().map(|&id| chain.block(id)).collect();
                chain.blocks(&blocks)
            });
        }
        ahead
    }

    fn fetch(
        &self,
        ids: Vec<BlockId>,
        read: impl FnOnce(&[BlockId]) -> StoreResult<Vec<Vec<u8>>> + Send + 'static,
    ) {
        self.0.blocks().extend(ids.iter().map(|&id| (id, None)));
        let under_way = UnderWay { shared: self.0.clone(), ids };
        let run = move || match read(&under_way.ids) {
            Ok(come) => {
                let come = come.into_iter().map(|raw| Some(SharedBytes::from(raw)));
                under_way.shared.blocks().extend(under_way.ids.iter().copied().zip(come));
            }
            Err(error) => tracing::debug!(%error, "nothing is fetched ahead"),
        };
        if let Err(error) = std::thread::Builder::new().name("ahead".into()).spawn(run) {
            tracing::debug!(%error, "nothing is fetched ahead: no thread");
        }
    }

    /// Whether a block is here or on its way.
    pub(crate) fn has(&self, id: BlockId) -> bool {
        self.0.blocks().contains_key(&id)
    }

    /// A block that is here, or comes while this waits.
    pub(crate) fn wait_for(&self, id: BlockId) -> Option<SharedBytes> {
        let blocks = self.0.blocks();
        let is_coming = |blocks: &mut BTreeMap<_, Option<_>>| matches!(blocks.get(&id), Some(None));
        let blocks = self.0.changed.wait_while(blocks, is_coming);
        blocks.unwrap_or_else(PoisonError::into_inner).get(&id).cloned().flatten()
    }
}

/// Blocks that are fetched together, each once, in their order in the store.
fn groups(wanted: &[BlockId], raw: impl Fn(&BlockId) -> u64) -> Vec<Vec<BlockId>> {
    let (mut room, mut bytes) = (AHEAD_BYTES_MAX, GROUP_BYTES);
    let mut seen = BTreeSet::new();
    let mut groups: Vec<Vec<BlockId>> = Vec::new();
    for id in wanted {
        let Some(less) = room.checked_sub(raw(id)) else { break };
        if !seen.insert(*id) {
            continue;
        }
        room = less;
        if bytes >= GROUP_BYTES {
            groups.push(Vec::new());
            bytes = 0;
        }
        bytes += raw(id);
        if let Some(group) = groups.last_mut() {
            group.push(*id);
        }
    }
    groups.iter_mut().for_each(|group| group.sort_unstable());
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::StoreError;

    #[test]
    fn whoever_asks_waits_for_what_is_on_its_way() {
        let ahead = Ahead::default();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        ahead.fetch(vec![(0, 1), (0, 2)], move |ids| {
            wait.recv().expect("told to go");
            Ok(ids.iter().map(|id| vec![id.1 as u8]).collect())
        });
        assert!(ahead.has((0, 2)) && !ahead.has((0, 3)));
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| ahead.wait_for((0, 2)));
            go.send(()).expect("it waits");
            assert_eq!(asked.join().expect("no panic"), Some(vec![2].into()));
        });
        // Again, for another page of it.
        assert_eq!(ahead.wait_for((0, 2)), Some(vec![2].into()));
        assert_eq!(ahead.wait_for((0, 3)), None);
    }

    #[test]
    fn nobody_waits_for_what_fails() {
        let ahead = Ahead::default();
        ahead.fetch(vec![(0, 1)], |_| Err(StoreError::Unreachable("a test".into())));
        ahead.fetch(vec![(0, 2)], |_| panic!("this panic is part of the test"));
        assert_eq!((ahead.wait_for((0, 1)), ahead.wait_for((0, 2))), (None, None));
    }

    #[test]
    fn groups_have_each_block_once_and_end_where_the_room_does() {
        let wanted: Vec<BlockId> = (0..300).rev().flat_map(|at| [(1, at), (1, at)]).collect();
        let groups = groups(&wanted, |_| 128 << 10);
        assert_eq!(groups.iter().map(Vec::len).collect::<Vec<_>>(), [16; 8]);
        assert_eq!((groups[0][0], groups[0][15]), ((1, 284), (1, 299)));
    }
}
