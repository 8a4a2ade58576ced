//! Finds stored checkpoints and reads them: whole, or page by page.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::sync::{Arc, OnceLock};

use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::source::{self, BlockContent, PageSource, SourceError, Span};
use hotspare_image::touch::TouchSet;
use hotspare_image::{Checkpoint, SharedBytes};
use rayon::prelude::*;

use crate::ahead::Ahead;
use crate::bucket::{Address, Bucket};
use crate::by_place::ByPlace;
use crate::chain::{BlockId, Chain, Link, WINDOW_BYTES, windows};
use crate::error::{StoreError, StoreResult};
use crate::extents::Run;
use crate::fold::{Layer, fold};
use crate::manifest::{About, BLOCK_PAGES, Manifest, Place, is_encrypted};
use crate::names::{self, Base, Name};
use crate::nearby::{Nearby, PackMemory, PackSource};
use crate::pages::{Held, Pages, owners};
use crate::seal::Key;
use crate::writer::{folder, open_reign, reign_name};

pub use crate::writer::ReignRecord as Reign;

/// A block of which fewer pages are wanted has its turn with the others.
const DENSE_PAGES: u64 = BLOCK_PAGES / 4;

/// What is cheap has at most so many times as much unpacked as it may have stored.
const UNPACKED_MAX: u64 = 4;

/// A store of checkpoints. Copies of it share what is behind it.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) bucket: Arc<Bucket>,
    pub(crate) key: Option<Key>,
    /// Asked for blocks before the bucket is.
    pub(crate) nearby: Arc<Vec<Nearby>>,
    /// Where a writer leaves what it writes, for others to ask for.
    pub(crate) memory: Option<Arc<PackMemory>>,
}

/// The checkpoints of a guest, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Catalogue(BTreeSet<Name>);

impl Catalogue {
    /// Of these.
    #[must_use]
    pub fn of(names: Vec<Name>) -> Self {
        Self(names.into_iter().collect())
    }

    /// All of them, by reign and epoch.
    #[must_use]
    pub fn names(&self) -> Vec<Name> {
        self.0.iter().copied().collect()
    }

    /// Those of one reign.
    pub fn of_reign(&self, reign: u64) -> impl Iterator<Item = Name> {
        self.0.iter().filter(move |name| name.reign == reign).copied()
    }

    /// One more.
    pub fn add(&mut self, name: Name) {
        self.0.insert(name);
    }

    /// One is gone.
    pub fn remove(&mut self, name: Name) {
        self.0.remove(&name);
    }

    pub(crate) fn named(&self, reign: u64, epoch: u64) -> Option<Name> {
        // Where there are two the whole one is as good, and less to read: it comes first.
        let first = Name { reign, epoch, base: Base::Whole, time_ms: 0, bytes: 0 };
        let found = self.0.range(first..).next().copied();
        found.filter(|name| (name.reign, name.epoch) == (reign, epoch))
    }

    /// What is needed for a checkpoint, from the whole one on. `None` if some of it is missing.
    #[must_use]
    pub fn chain(&self, reign: u64, epoch: u64) -> Option<Vec<Name>> {
        let mut chain = Vec::new();
        let mut at = epoch;
        loop {
            let name = self.named(reign, at)?;
            chain.push(name);
            match name.base {
                Base::Whole => break,
                Base::Epoch(before) => at = before,
            }
        }
        chain.reverse();
        Some(chain)
    }

    /// The newest checkpoint; of those that were taken until `time_ms`, if that is given.
    #[must_use]
    pub fn newest(&self, until_ms: Option<u64>) -> Option<Name> {
        let old_enough = |name: &&Name| until_ms.is_none_or(|until| name.time_ms <= until);
        let newest = self.0.iter().rev().find(old_enough)?;
        self.named(newest.reign, newest.epoch)
    }

    /// The checkpoint of an epoch; of the newest reign that has it.
    #[must_use]
    pub fn at_epoch(&self, epoch: u64) -> Option<Name> {
        let newest = self.0.iter().rev().find(|name| name.epoch == epoch)?;
        self.named(newest.reign, epoch)
    }
}

impl Store {
    /// Does not connect yet.
    pub fn open(address: &Address, key: Option<Key>) -> StoreResult<Self> {
        let bucket = Arc::new(Bucket::open(address)?);
        Ok(Self { bucket, key, nearby: Arc::default(), memory: None })
    }

    /// Blocks are asked for there first, in this order. What is wrong or cannot be had there comes
    /// from the next, at last from the store itself.
    #[must_use]
    pub fn with_nearby(self, sources: Vec<Box<dyn PackSource>>) -> Self {
        let nearby = Arc::new(sources.into_iter().map(Nearby::new).collect());
        Self { nearby, ..self }
    }

    /// Packs that are written are kept there as well.
    #[must_use]
    pub fn with_memory(self, memory: Arc<PackMemory>) -> Self {
        Self { memory: Some(memory), ..self }
    }

    pub(crate) fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Where the objects are.
    pub fn bucket(&self) -> &Bucket {
        &self.bucket
    }

    /// Guests that have checkpoints here.
    pub fn guests(&self) -> StoreResult<Vec<String>> {
        let folders = self.bucket.folders()?;
        Ok(folders.iter().filter_map(|folder| names::guest(folder)).collect())
    }

    /// Numbers of the reigns over a guest.
    pub fn reigns(&self, guest: &str) -> StoreResult<Vec<u64>> {
        let listed = self.bucket.list(&format!("{}/reigns", folder(guest)))?;
        Ok(listed.iter().filter_map(|one| one.name.parse().ok()).collect())
    }

    /// Who reigned.
    pub fn reign(&self, guest: &str, reign: u64) -> StoreResult<Reign> {
        let name = reign_name(guest, reign);
        open_reign(&self.bucket.get(&name)?, &name)
    }

    /// Checkpoints of a guest.
    pub fn catalogue(&self, guest: &str) -> StoreResult<Catalogue> {
        let listed = self.bucket.list(&format!("{}/checkpoints", folder(guest)))?;
        Ok(Catalogue(listed.iter().filter_map(|one| Name::parse(&one.name)).collect()))
    }

    /// The manifest of a checkpoint.
    pub fn manifest(&self, guest: &str, name: Name) -> StoreResult<Manifest> {
        let object = format!("{}/checkpoints/{}", folder(guest), name.manifest());
        self.open_manifest(guest, name, &self.bucket.get(&object)?)
    }

    fn open_manifest(&self, guest: &str, name: Name, bytes: &[u8]) -> StoreResult<Manifest> {
        let object = format!("{}/checkpoints/{}", folder(guest), name.manifest());
        let manifest = Manifest::open(bytes, &object, self.key.as_ref())?;
        let base = match name.base {
            Base::Whole => None,
            Base::Epoch(epoch) => Some(epoch),
        };
        let named = (name.reign, name.epoch, base, name.bytes);
        let is = (manifest.reign, manifest.about.position.epoch.0, manifest.base);
        if (is.0, is.1, is.2, manifest.packs.iter().sum()) != named || manifest.about.guest != guest
        {
            return Err(StoreError::damaged(&object, 0, "it is another checkpoint's"));
        }
        if is_encrypted(bytes) != self.key.is_some() {
            // Without a key it could not have been opened.
            return Err(StoreError::Key(format!(
                "{object} is not encrypted, though a key is given: who has put it there?"
            )));
        }
        Ok(manifest)
    }

    /// Gets ready to read a checkpoint.
    pub fn load(&self, guest: &str, catalogue: &Catalogue, name: Name) -> StoreResult<Loaded> {
        self.look_up(guest, catalogue, name)?.load_ahead(|_| Vec::new())
    }

    /// Reads what is known of a checkpoint and of all that it stands on.
    pub fn look_up(&self, guest: &str, catalogue: &Catalogue, name: Name) -> StoreResult<Known> {
        Ok(Known(Arc::new(self.chain(guest, catalogue, name)?)))
    }

    fn chain(&self, guest: &str, catalogue: &Catalogue, name: Name) -> StoreResult<Chain> {
        let chain = catalogue.chain(name.reign, name.epoch).ok_or_else(|| {
            StoreError::Missing(format!("a checkpoint that epoch {} stands on", name.epoch))
        })?;
        let folder = folder(guest);
        let objects = chain.iter().map(|name| format!("{folder}/checkpoints/{}", name.manifest()));
        let read = self.bucket.get_all(&objects.collect::<Vec<_>>())?;
        let open = |(name, bytes): (Name, Vec<u8>)| {
            Ok(Link { name, manifest: self.open_manifest(guest, name, &bytes)? })
        };
        let links: StoreResult<_> = chain.into_par_iter().zip(read).map(open).collect();
        Ok(Chain { store: self.clone(), folder, links: links? })
    }
}

/// A checkpoint of which it is known where everything is.
#[derive(Debug)]
pub struct Known(Arc<Chain>);

impl Known {
    /// What is known of it.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.0.end().manifest.about
    }

    /// Gets ready to read it; and fetches, beside its state, what `soon` says will be read before
    /// long. It is asked as soon as it is known which pages there are.
    pub fn load_ahead(self, soon: impl FnOnce(&Loaded) -> Vec<Span>) -> StoreResult<Loaded> {
        let chain = self.0;
        std::thread::scope(|scope| {
            let asked = std::thread::Builder::new().spawn_scoped(scope, || chain.state());
            let asked = asked.map_err(StoreError::local("start a thread"))?;
            let links = chain.links.par_iter().enumerate();
            let layers = links.map(|(at, link)| Layer::of(&link.manifest, at as u32)).collect();
            let (pages, by_place, ahead) = (fold(layers), OnceLock::new(), Ahead::default());
            let mut loaded =
                Loaded { chain: chain.clone(), pages, by_place, ahead, state: Vec::new() };
            let soon = loaded.blocks_of(&soon(&loaded));
            loaded.ahead = Ahead::begin(&chain, &soon);
            let state = asked.join().map_err(|_| StoreError::Local("a thread failed".into()))?;
            loaded.state = state?;
            let checkpoint = loaded.checkpoint()?;
            loaded.pages.retain(&owners(&checkpoint), &mut |_, _| {});
            Ok(loaded)
        })
    }
}

/// A checkpoint that can be read.
#[derive(Debug)]
pub struct Loaded {
    chain: Arc<Chain>,
    pages: Pages<Place>,
    by_place: OnceLock<ByPlace>,
    ahead: Ahead,
    state: Vec<u8>,
}

impl Loaded {
    /// Makes what is made when it is asked for first.
    pub fn get_ready(&self) {
        self.by_place();
    }

    /// What is known of it.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.chain.end().manifest.about
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> Name {
        self.chain.end().name
    }

    /// What its program touched, as far as that is known.
    pub fn touches(&self) -> StoreResult<TouchSet> {
        self.chain.store.touches(&self.about().guest, self.name().reign)
    }

    /// A restart has learned more.
    pub fn put_touches(&self, touched: &TouchSet) -> StoreResult<()> {
        self.chain.store.put_touches(&self.about().guest, self.name().reign, touched)
    }

    /// Names of all that it needs.
    pub fn chain(&self) -> impl Iterator<Item = Name> {
        self.chain.links.iter().map(|link| link.name)
    }

    /// Which pages it has.
    #[must_use]
    pub fn pages(&self) -> &Pages<Place> {
        &self.pages
    }

    /// The bytes of its state.
    pub(crate) fn state(&self) -> &[u8] {
        &self.state
    }

    /// Its state.
    pub fn checkpoint(&self) -> StoreResult<Checkpoint> {
        let object = self.name().manifest();
        let wrong = |why: String| StoreError::damaged(&object, 0, why);
        Checkpoint::from_bytes(&self.state).map_err(|error| wrong(error.to_string()))
    }

    /// Bytes of the file changes of the whole chain.
    #[must_use]
    pub fn changes_bytes(&self) -> u64 {
        let blocks = self.chain.links.iter().flat_map(|link| &link.manifest.changes);
        blocks.map(|block| u64::from(block.raw)).sum()
    }

    /// The file changes of the whole chain, one after another.
    pub fn changes(&self) -> impl Read + '_ {
        Changes { loaded: self, link: 0, next: 0, bytes: std::io::Cursor::default() }
    }

    /// The bytes of all pages, in the order in which they are listed.
    pub(crate) fn each_in_order(
        &self,
        mut each: impl FnMut(&[u8]) -> StoreResult<()>,
    ) -> StoreResult<()> {
        for (&owner, owned) in &self.pages.0 {
            let runs = owned.pages.iter().filter(|(_, _, held)| matches!(held, Held::At(_)));
            let mut spans = Vec::new();
            let mut waiting = 0;
            for (first, pages, _) in runs {
                let mut done = 0;
                while done < pages {
                    let some = (pages - done).min(WINDOW_BYTES / PAGE_BYTES - waiting);
                    spans.push(Span { owner, start: (first + done) * PAGE_BYTES, pages: some });
                    (done, waiting) = (done + some, waiting + some);
                    if waiting == WINDOW_BYTES / PAGE_BYTES {
                        self.hand_out(&std::mem::take(&mut spans), &mut each)?;
                        waiting = 0;
                    }
                }
            }
            self.hand_out(&spans, &mut each)?;
        }
        Ok(())
    }

    fn hand_out(
        &self,
        spans: &[Span],
        each: &mut impl FnMut(&[u8]) -> StoreResult<()>,
    ) -> StoreResult<()> {
        for block in self.read_spans(spans)? {
            if let BlockContent::Bytes(bytes) = &block.content {
                each(bytes)?;
            }
        }
        Ok(())
    }

    /// Checks every byte of the checkpoint, and of what it stands on; how many objects these are.
    pub fn verify(&self) -> StoreResult<u64> {
        let mut objects = 0;
        for (at, link) in self.chain.links.iter().enumerate() {
            let Manifest { packs, state, changes, blocks, .. } = &link.manifest;
            for (pack, bytes) in packs.iter().enumerate() {
                let object = self.chain.pack_name(at as u32, pack as u32);
                let length = self.chain.store.bucket.length(&object)?;
                if length != *bytes {
                    let why = format!("it has {length} bytes, and had {bytes}");
                    return Err(StoreError::damaged(&object, length.min(*bytes), why));
                }
            }
            for blocks in [state, changes, blocks] {
                self.chain.each_block(at as u32, blocks, |_, _| Ok(()))?;
            }
            objects += packs.len() as u64 + 1;
        }
        Ok(objects)
    }

    /// The pages of `wanted`, see [`PageSource::read`].
    pub fn read_spans(&self, wanted: &[Span]) -> StoreResult<Vec<source::Block>> {
        let parts = self.parts(wanted);
        let blocks = parts.iter().filter_map(|(_, held)| block_of((*held)?));
        let read = self.read_blocks(&blocks.collect())?;
        let found = parts.into_iter().map(|(span, held)| {
            let content = match held {
                None => BlockContent::Absent,
                Some(Held::Zero) => BlockContent::Zero,
                Some(Held::At(place)) => {
                    let from = (place.page % BLOCK_PAGES * PAGE_BYTES) as usize;
                    let to = from + (span.pages * PAGE_BYTES) as usize;
                    BlockContent::Bytes(read[&id_of(place)].part(from..to))
                }
            };
            source::Block { span, content }
        });
        Ok(found.collect())
    }

    /// Spans in parts of which none lies in two blocks, and what each holds.
    fn parts(&self, spans: &[Span]) -> Vec<(Span, Option<Held<Place>>)> {
        let mut parts = Vec::with_capacity(spans.len());
        for &Span { owner, start, pages } in spans {
            let mut cut = |first: u64, pages: u64, held: Option<Held<Place>>| {
                let mut done = 0;
                while done < pages {
                    let held = held.map(|held| held.after(done));
                    let some = match held {
                        Some(Held::At(place)) => BLOCK_PAGES - place.page % BLOCK_PAGES,
                        Some(Held::Zero) | None => pages,
                    };
                    let some = some.min(pages - done);
                    let start = (first + done) * PAGE_BYTES;
                    parts.push((Span { owner, start, pages: some }, held));
                    done += some;
                }
            };
            match self.pages.0.get(&owner) {
                Some(owned) => owned.pages.cover(start / PAGE_BYTES, pages, cut),
                None => cut(start / PAGE_BYTES, pages, None),
            }
        }
        parts
    }

    /// The blocks that have pages of `spans`, in this order, each once.
    fn blocks_of(&self, spans: &[Span]) -> Vec<BlockId> {
        let mut seen = BTreeSet::new();
        let parts = self.parts(spans).into_iter();
        parts.filter_map(|(_, held)| block_of(held?)).filter(|id| seen.insert(*id)).collect()
    }

    /// How many of these pages each block has.
    fn wanted_of(parts: &[(Span, Option<Held<Place>>)]) -> BTreeMap<BlockId, u64> {
        let mut wanted: BTreeMap<BlockId, u64> = BTreeMap::new();
        for (span, held) in parts {
            if let Some(id) = held.and_then(block_of) {
                *wanted.entry(id).or_default() += span.pages;
            }
        }
        wanted
    }

    fn read_blocks(
        &self,
        wanted: &BTreeSet<BlockId>,
    ) -> StoreResult<BTreeMap<BlockId, SharedBytes>> {
        let (coming, mut rest): (Vec<BlockId>, Vec<BlockId>) =
            wanted.iter().partition(|id| self.ahead.has(**id));
        let mut found = self.fetch(&rest)?;
        rest.clear();
        for id in coming {
            match self.ahead.wait_for(id) {
                Some(block) => drop(found.insert(id, block)),
                None => rest.push(id),
            }
        }
        found.extend(self.fetch(&rest)?);
        Ok(found)
    }

    fn fetch(&self, ids: &[BlockId]) -> StoreResult<BTreeMap<BlockId, SharedBytes>> {
        let blocks: Vec<_> = ids.iter().map(|&id| self.chain.block(id)).collect();
        let raw = self.chain.blocks(&blocks)?.into_iter().map(SharedBytes::from);
        Ok(ids.iter().copied().zip(raw).collect())
    }

    fn by_place(&self) -> &ByPlace {
        self.by_place.get_or_init(|| ByPlace::of(&self.pages))
    }
}

fn id_of(place: Place) -> BlockId {
    (place.link, (place.page / BLOCK_PAGES) as usize)
}

fn block_of(held: Held<Place>) -> Option<BlockId> {
    match held {
        Held::Zero => None,
        Held::At(place) => Some(id_of(place)),
    }
}

/// Spans of which none begins where the one before it ends.
fn joined(parts: Vec<(Span, Option<Held<Place>>)>) -> Vec<Span> {
    let mut joined: Vec<Span> = Vec::new();
    for (span, _) in parts {
        match joined.last_mut() {
            Some(last) if (last.owner, last.end()) == (span.owner, span.start) => {
                last.pages += span.pages;
            }
            _ => joined.push(span),
        }
    }
    joined
}

/// Reads file changes as they are wanted.
struct Changes<'a> {
    loaded: &'a Loaded,
    link: usize,
    next: usize,
    bytes: std::io::Cursor<Vec<u8>>,
}

impl Read for Changes<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        loop {
            let read = self.bytes.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let Some(link) = self.loaded.chain.links.get(self.link) else { return Ok(0) };
            let Some(blocks) = link.manifest.changes.get(self.next..).filter(|b| !b.is_empty())
            else {
                (self.link, self.next) = (self.link + 1, 0);
                continue;
            };
            let some = windows(blocks).first().cloned().unwrap_or(0..1);
            let blocks: Vec<_> =
                blocks[some.clone()].iter().map(|block| (self.link as u32, block)).collect();
            let raw = self.loaded.chain.blocks(&blocks);
            let raw = raw.map_err(std::io::Error::other)?;
            self.next += some.end;
            self.bytes = std::io::Cursor::new(raw.concat());
        }
    }
}

fn source_error(error: StoreError) -> SourceError {
    match error {
        StoreError::Unreachable(_) | StoreError::Refused(_) => SourceError::Gone(error.to_string()),
        _ => SourceError::Damaged(error.to_string()),
    }
}

impl PageSource for Loaded {
    fn read(&self, wanted: &[Span]) -> Result<Vec<source::Block>, SourceError> {
        self.read_spans(wanted).map_err(source_error)
    }

    fn whole(&self, wanted: &[Span]) -> Vec<Span> {
        let (mut spans, mut seen) = (Vec::new(), BTreeSet::new());
        for (span, held) in self.parts(wanted) {
            match held.and_then(block_of) {
                None => spans.push(span),
                Some(id) if seen.insert(id) => {
                    spans.extend(self.by_place().of_block(id));
                }
                Some(_) => {}
            }
        }
        spans
    }

    fn cheapest(&self, wanted: &[Span], mut room: u64) -> (Vec<Span>, Vec<Span>) {
        let parts = self.parts(wanted);
        let stored = |id: &BlockId| u64::from(self.chain.block(*id).1.stored);
        let mut blocks: Vec<(BlockId, u64)> = Self::wanted_of(&parts).into_iter().collect();
        blocks.sort_by_key(|(id, pages)| (stored(id) / pages, *id));
        let mut cheap = BTreeSet::new();
        // What is nearly nothing as it is stored still has to be unpacked.
        let most = room / (BLOCK_PAGES * PAGE_BYTES) * UNPACKED_MAX;
        for (id, _) in blocks.into_iter().take(usize::try_from(most).unwrap_or(usize::MAX)) {
            let Some(less) = room.checked_sub(stored(&id)) else { break };
            room = less;
            cheap.insert(id);
        }
        let is_cheap =
            |part: &(_, Option<_>)| part.1.and_then(block_of).is_none_or(|id| cheap.contains(&id));
        let (cheap, others): (Vec<_>, Vec<_>) = parts.into_iter().partition(is_cheap);
        (joined(cheap), joined(others))
    }

    fn dense(&self, wanted: &[Span]) -> Vec<Span> {
        let parts = self.parts(wanted);
        let blocks = Self::wanted_of(&parts);
        let is_dense = |held: Option<Held<Place>>| {
            held.and_then(block_of).is_none_or(|id| blocks[&id] >= DENSE_PAGES)
        };
        joined(parts.into_iter().filter(|(_, held)| is_dense(*held)).collect())
    }

    fn all(&self) -> Vec<Span> {
        self.by_place().in_order()
    }
}
