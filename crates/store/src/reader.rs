//! Finds stored checkpoints and reads them: whole, or page by page.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::source::{self, BlockContent, PageSource, SourceError, Span};
use hotspare_image::touch::TouchSet;
use hotspare_image::{Checkpoint, SharedBytes};

use crate::bucket::{Address, Bucket};
use crate::error::{StoreError, StoreResult};
use crate::extents::Run;
use crate::manifest::{About, BLOCK_PAGES, Block, Manifest, Place, is_encrypted};
use crate::names::{self, Base, Name};
use crate::pages::{Held, Pages, owners};
use crate::seal::{self, Key};
use crate::writer::{folder, open_reign, reign_name};

pub use crate::writer::ReignRecord as Reign;

/// Bytes that are asked for at once when everything is wanted.
const WINDOW_BYTES: u64 = 8 << 20;
/// Longest span that [`PageSource::all`] gives.
const SPAN_PAGES: u64 = 256;

/// A store of checkpoints. Copies of it share what is behind it.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) bucket: Arc<Bucket>,
    pub(crate) key: Option<Key>,
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
        Ok(Self { bucket: Arc::new(Bucket::open(address)?), key })
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
        let chain = catalogue.chain(name.reign, name.epoch).ok_or_else(|| {
            StoreError::Missing(format!("a checkpoint that epoch {} stands on", name.epoch))
        })?;
        let folder = folder(guest);
        let objects = chain.iter().map(|name| format!("{folder}/checkpoints/{}", name.manifest()));
        let read = self.bucket.get_all(&objects.collect::<Vec<_>>())?;
        let mut links = Vec::new();
        for (name, bytes) in chain.into_iter().zip(read) {
            links.push(Link { name, manifest: self.open_manifest(guest, name, &bytes)? });
        }
        let mut pages = Pages::default();
        for (at, link) in links.iter().enumerate() {
            pages.follow(&link.manifest.pages(at as u32), |place| place);
        }
        let (by_block, state) = (OnceLock::new(), OnceLock::new());
        let mut loaded = Loaded { store: self.clone(), folder, links, pages, by_block, state };
        let checkpoint = loaded.checkpoint()?;
        loaded.pages.retain(&owners(&checkpoint), &mut |_, _| {});
        Ok(loaded)
    }
}

#[derive(Debug)]
struct Link {
    name: Name,
    manifest: Manifest,
}

/// A checkpoint that can be read.
#[derive(Debug)]
pub struct Loaded {
    store: Store,
    folder: String,
    links: Vec<Link>,
    pages: Pages<Place>,
    by_block: OnceLock<BTreeMap<(u32, u64), Vec<Span>>>,
    state: OnceLock<Vec<u8>>,
}

impl Loaded {
    fn end(&self) -> &Link {
        self.links.last().expect("a chain has an end")
    }

    /// What is known of it.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.end().manifest.about
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> Name {
        self.end().name
    }

    /// What its program touched, as far as that is known.
    pub fn touches(&self) -> StoreResult<TouchSet> {
        self.store.touches(&self.about().guest, self.name().reign)
    }

    /// A restart has learned more.
    pub fn put_touches(&self, touched: &TouchSet) -> StoreResult<()> {
        self.store.put_touches(&self.about().guest, self.name().reign, touched)
    }

    /// Names of all that it needs.
    pub fn chain(&self) -> impl Iterator<Item = Name> {
        self.links.iter().map(|link| link.name)
    }

    /// Which pages it has.
    #[must_use]
    pub fn pages(&self) -> &Pages<Place> {
        &self.pages
    }

    fn pack_name(&self, link: u32, pack: u32) -> String {
        let Link { name, manifest } = &self.links[link as usize];
        format!("{}/packs/{}", self.folder, name.pack(manifest.attempt, pack as usize))
    }

    /// Blocks, unpacked, of whichever links and packs, all at a time.
    fn blocks(&self, wanted: &[(u32, &Block)]) -> StoreResult<Vec<Vec<u8>>> {
        let mut objects: Vec<(String, Vec<Range<u64>>)> = Vec::new();
        for some in wanted.chunk_by(|a, b| (a.0, a.1.pack) == (b.0, b.1.pack)) {
            let range =
                |(_, block): &(u32, &Block)| block.offset..block.offset + u64::from(block.stored);
            let object = self.pack_name(some[0].0, some[0].1.pack);
            objects.push((object, some.iter().map(range).collect()));
        }
        let read = self.store.bucket.get_parts(&objects)?;
        let parts = objects
            .iter()
            .zip(read)
            .flat_map(|((object, _), parts)| parts.into_iter().map(move |stored| (object, stored)));
        wanted
            .iter()
            .zip(parts)
            .map(|((_, block), (object, stored))| self.open(object, stored, block))
            .collect()
    }

    fn open(&self, object: &str, stored: Vec<u8>, block: &Block) -> StoreResult<Vec<u8>> {
        if seal::hash(&stored) != block.hash {
            let why = format!("some of the {} bytes from there have changed", block.stored);
            return Err(StoreError::damaged(object, block.offset, why));
        }
        let key = self.store.key.as_ref();
        let (at, raw) = ((object, block.offset), block.raw as usize);
        seal::unpack(stored, key, key.is_some(), at, raw)
    }

    /// Reads blocks in order, several by one request.
    fn each_block(
        &self,
        link: u32,
        blocks: &[Block],
        mut each: impl FnMut(usize, Vec<u8>) -> StoreResult<()>,
    ) -> StoreResult<()> {
        for Range { start, end } in windows(blocks) {
            let some: Vec<_> = blocks[start..end].iter().map(|block| (link, block)).collect();
            for (at, raw) in (start..).zip(self.blocks(&some)?) {
                each(at, raw)?;
            }
        }
        Ok(())
    }

    /// The bytes of its state.
    pub fn state(&self) -> StoreResult<Vec<u8>> {
        if let Some(state) = self.state.get() {
            return Ok(state.clone());
        }
        let mut state = Vec::new();
        let link = self.links.len() as u32 - 1;
        self.each_block(link, &self.end().manifest.state, |_, raw| {
            state.extend(raw);
            Ok(())
        })?;
        Ok(self.state.get_or_init(|| state).clone())
    }

    /// Its state.
    pub fn checkpoint(&self) -> StoreResult<Checkpoint> {
        let object = self.name().manifest();
        let wrong = |why: String| StoreError::damaged(&object, 0, why);
        Checkpoint::from_bytes(&self.state()?).map_err(|error| wrong(error.to_string()))
    }

    /// Bytes of the file changes of the whole chain.
    #[must_use]
    pub fn changes_bytes(&self) -> u64 {
        let blocks = self.links.iter().flat_map(|link| &link.manifest.changes);
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
        for (at, link) in self.links.iter().enumerate() {
            let Manifest { packs, state, changes, blocks, .. } = &link.manifest;
            for (pack, bytes) in packs.iter().enumerate() {
                let object = self.pack_name(at as u32, pack as u32);
                let length = self.store.bucket.length(&object)?;
                if length != *bytes {
                    let why = format!("it has {length} bytes, and had {bytes}");
                    return Err(StoreError::damaged(&object, length.min(*bytes), why));
                }
            }
            for blocks in [state, changes, blocks] {
                self.each_block(at as u32, blocks, |_, _| Ok(()))?;
            }
            objects += packs.len() as u64 + 1;
        }
        Ok(objects)
    }

    /// The pages of `wanted`, see [`PageSource::read`].
    pub fn read_spans(&self, wanted: &[Span]) -> StoreResult<Vec<source::Block>> {
        let mut pieces = Vec::new();
        let mut blocks = BTreeSet::new();
        for span in wanted {
            for (first, pages, held) in self.covered(span) {
                if let Some(Held::At(place)) = held {
                    let last = place.page + pages - 1;
                    let needed = place.page / BLOCK_PAGES..=last / BLOCK_PAGES;
                    blocks.extend(needed.map(|block| (place.link, block as usize)));
                }
                pieces.push((span.owner, first, pages, held));
            }
        }
        let read = self.read_blocks(&blocks)?;
        let mut found = Vec::new();
        for (owner, first, pages, held) in pieces {
            let whole = Span { owner, start: first * PAGE_BYTES, pages };
            match held {
                None => found.push(source::Block { span: whole, content: BlockContent::Absent }),
                Some(Held::Zero) => {
                    found.push(source::Block { span: whole, content: BlockContent::Zero });
                }
                Some(Held::At(place)) => {
                    let mut done = 0;
                    while done < pages {
                        let page = place.page + done;
                        let (block, inside) = (page / BLOCK_PAGES, page % BLOCK_PAGES);
                        let some = (BLOCK_PAGES - inside).min(pages - done);
                        let from = (inside * PAGE_BYTES) as usize;
                        let to = from + (some * PAGE_BYTES) as usize;
                        let content = read[&(place.link, block as usize)].part(from..to);
                        let start = whole.start + done * PAGE_BYTES;
                        let span = Span { owner, start, pages: some };
                        found.push(source::Block { span, content: BlockContent::Bytes(content) });
                        done += some;
                    }
                }
            }
        }
        Ok(found)
    }

    fn covered(&self, span: &Span) -> Vec<(u64, u64, Option<Held<Place>>)> {
        let first = span.start / PAGE_BYTES;
        match self.pages.0.get(&span.owner) {
            Some(owned) => owned.pages.cover(first, span.pages),
            None => vec![(first, span.pages, None)],
        }
    }

    fn read_blocks(
        &self,
        wanted: &BTreeSet<(u32, usize)>,
    ) -> StoreResult<BTreeMap<(u32, usize), SharedBytes>> {
        let block =
            |&(link, at): &(u32, usize)| (link, &self.links[link as usize].manifest.blocks[at]);
        let list: Vec<(u32, &Block)> = wanted.iter().map(block).collect();
        let raw = self.blocks(&list)?.into_iter().map(SharedBytes::from);
        Ok(wanted.iter().copied().zip(raw).collect())
    }

    /// The pages that each block has, as far as they count.
    fn by_block(&self) -> &BTreeMap<(u32, u64), Vec<Span>> {
        self.by_block.get_or_init(|| {
            let mut blocks: BTreeMap<(u32, u64), Vec<Span>> = BTreeMap::new();
            for (&owner, owned) in &self.pages.0 {
                for (first, pages, held) in owned.pages.iter() {
                    let Held::At(place) = held else { continue };
                    let mut done = 0;
                    while done < pages {
                        let page = place.page + done;
                        let some = (BLOCK_PAGES - page % BLOCK_PAGES).min(pages - done);
                        let start = (first + done) * PAGE_BYTES;
                        let block = blocks.entry((place.link, page / BLOCK_PAGES)).or_default();
                        block.push(Span { owner, start, pages: some });
                        done += some;
                    }
                }
            }
            blocks
        })
    }
}

/// Runs of blocks that are read by one request each.
fn windows(blocks: &[Block]) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for (at, block) in blocks.iter().enumerate() {
        let joins = found.last().is_some_and(|last| {
            let (first, before) = (&blocks[last.start], &blocks[at - 1]);
            let follows = before.offset + u64::from(before.stored) == block.offset;
            let end = block.offset + u64::from(block.stored);
            first.pack == block.pack && follows && end - first.offset <= WINDOW_BYTES
        });
        match found.last_mut().filter(|_| joins) {
            Some(last) => last.end = at + 1,
            None => found.push(at..at + 1),
        }
    }
    found
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
            let Some(link) = self.loaded.links.get(self.link) else { return Ok(0) };
            let Some(blocks) = link.manifest.changes.get(self.next..).filter(|b| !b.is_empty())
            else {
                (self.link, self.next) = (self.link + 1, 0);
                continue;
            };
            let some = windows(blocks).first().cloned().unwrap_or(0..1);
            let blocks: Vec<_> =
                blocks[some.clone()].iter().map(|block| (self.link as u32, block)).collect();
            let raw = self.loaded.blocks(&blocks);
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
        for span in wanted {
            for (first, pages, held) in self.covered(span) {
                let Some(Held::At(place)) = held else {
                    spans.push(Span { owner: span.owner, start: first * PAGE_BYTES, pages });
                    continue;
                };
                let last = place.page + pages - 1;
                for block in place.page / BLOCK_PAGES..=last / BLOCK_PAGES {
                    if seen.insert((place.link, block)) {
                        spans.extend(
                            self.by_block().get(&(place.link, block)).into_iter().flatten(),
                        );
                    }
                }
            }
        }
        spans
    }

    fn all(&self) -> Vec<Span> {
        let mut spans: Vec<(Option<Place>, Span)> = Vec::new();
        for (&owner, owned) in &self.pages.0 {
            for (first, pages, held) in owned.pages.iter() {
                let mut done = 0;
                while done < pages {
                    let place = match held {
                        Held::Zero => None,
                        Held::At(place) => Some(place.after(done)),
                    };
                    // Cut where blocks begin, so that none is read twice.
                    let inside = place.map_or(0, |place| place.page % BLOCK_PAGES);
                    let some = (SPAN_PAGES - inside).min(pages - done);
                    let start = (first + done) * PAGE_BYTES;
                    spans.push((place, Span { owner, start, pages: some }));
                    done += some;
                }
            }
        }
        spans.sort_by_key(|(place, span)| (*place, span.owner, span.start));
        spans.into_iter().map(|(_, span)| span).collect()
    }
}
