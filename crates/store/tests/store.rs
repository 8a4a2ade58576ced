//! Checkpoints of a made-up guest go into a directory and come back as they were, whatever
//! happens to the writer and to the objects.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hotspare_image::memory::{
    AddressSpace, Backing, GuestRange, Mapping, MmId, PAGE_BYTES, PageOwner, SharedId, SharedKind,
    SharedMemory,
};
use hotspare_image::source::{BlockContent, PageSource, Span};
use hotspare_image::tree::HostPath;
use hotspare_image::{Checkpoint, Epoch, Position, Term};
use hotspare_store::{
    About, Address, Base, Catalogue, Gatherer, Keep, Key, Loaded, PackMemory, PackSource, Parts,
    Point, Store, StoreError, Writer,
};

const GUEST: &str = "/usr/bin/guest";

/// Numbers that are the same for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }
}

/// What pages hold: some bytes of their own, or zeros if 0.
type Memory = BTreeMap<(PageOwner, u64), u64>;

fn content(seed: u64) -> Vec<u8> {
    if seed == 0 {
        return vec![0; PAGE_BYTES as usize];
    }
    let mut dice = Dice(seed);
    let line: Vec<u8> = (0..64).map(|_| dice.roll(256) as u8).collect();
    line.iter().copied().cycle().take(PAGE_BYTES as usize).collect()
}

/// A guest with one space and sometimes a shared object.
struct Guest {
    dice: Dice,
    memory: Memory,
    mapped: Vec<(u64, u64)>,
    shared: Option<(SharedId, u64)>,
    objects: u64,
    epoch: u64,
}

const SPACE: PageOwner = PageOwner::Mm(MmId(1));

impl Guest {
    fn new(seed: u64) -> Self {
        let (memory, mapped) = (Memory::new(), vec![(0, 400)]);
        Self { dice: Dice(seed), memory, mapped, shared: None, objects: 0, epoch: 0 }
    }

    fn state(&self, fresh: &[(u64, u64)], full: bool) -> Checkpoint {
        let range = |(from, to): &(u64, u64)| GuestRange::new(from * PAGE_BYTES, to * PAGE_BYTES);
        let mapping = |piece: &(u64, u64)| Mapping {
            range: range(piece),
            protection: 3,
            backing: Backing::Anonymous,
            flags: 0,
            protection_key: 0,
            name: None,
        };
        let space = AddressSpace {
            id: MmId(1),
            mappings: self.mapped.iter().map(mapping).collect(),
            layout: Default::default(),
            exe: HostPath(GUEST.into()),
            fresh: fresh.iter().map(range).collect(),
            reset: full,
        };
        let shared = self.shared.map(|(id, pages)| SharedMemory {
            id,
            kind: SharedKind::Anonymous,
            bytes: pages * PAGE_BYTES,
            reset: full,
        });
        let mut checkpoint = Checkpoint {
            position: Position::checkpoint(Epoch(self.epoch)),
            term: Term(1),
            spaces: vec![space],
            shared: shared.into_iter().collect(),
            ..Checkpoint::default()
        };
        checkpoint.clocks.realtime_ns = self.epoch * 1_000_000_000;
        checkpoint
    }

    /// Maps and unmaps, perhaps; what was mapped anew in its old place.
    fn remap(&mut self) -> Vec<(u64, u64)> {
        let mut fresh = Vec::new();
        match self.dice.roll(8) {
            0 => {
                let at = self.dice.roll(300);
                self.mapped = vec![(0, at.max(1)), (at.max(1) + 20, 400)];
            }
            1 => self.mapped = vec![(0, 400)],
            2 => {
                let at = self.dice.roll(380);
                fresh.push((at, at + 10));
            }
            3 => {
                self.objects += 1;
                self.shared = Some((SharedId(self.objects), 50));
            }
            4 => self.shared = self.shared.map(|(id, _)| (id, 10 + self.dice.roll(80))),
            _ => {}
        }
        fresh
    }

    /// One epoch, with all that it did.
    fn run(&mut self, gatherer: &mut Gatherer, full: bool) {
        self.epoch += 1;
        gatherer.begin(Position::checkpoint(Epoch(self.epoch)), Term(1), full);
        let fresh = self.remap();
        let (mapped, shared) = (self.mapped.clone(), self.shared);
        let is_there = |owner: PageOwner, page: u64| match owner {
            SPACE => mapped.iter().any(|(from, to)| (*from..*to).contains(&page)),
            PageOwner::Mm(_) => false,
            PageOwner::Shared(id) => shared.is_some_and(|(has, n)| has == id && page < n),
        };
        self.memory.retain(|(owner, page), _| {
            let anew = *owner == SPACE && fresh.iter().any(|(a, b)| (*a..*b).contains(page));
            is_there(*owner, *page) && !anew
        });
        if full {
            for (&(owner, page), &seed) in &self.memory {
                gatherer.pages(owner, page * PAGE_BYTES, &content(seed)).expect("room");
            }
        }
        for _ in 0..self.dice.roll(12) {
            let owner = match self.shared {
                Some((id, _)) if self.dice.roll(4) == 0 => PageOwner::Shared(id),
                _ => SPACE,
            };
            let (first, pages) = (self.dice.roll(390), 1 + self.dice.roll(60));
            let pages: Vec<u64> =
                (first..first + pages).take_while(|page| is_there(owner, *page)).collect();
            let Some(&first) = pages.first() else { continue };
            let start = first * PAGE_BYTES;
            match self.dice.roll(6) {
                0 => {
                    gatherer.discard(owner, start, pages.len() as u64);
                    self.memory.retain(|(has, page), _| *has != owner || !pages.contains(page));
                }
                1 => {
                    gatherer.zero(owner, start, pages.len() as u64);
                    self.memory.extend(pages.iter().map(|page| ((owner, *page), 0)));
                }
                _ => {
                    let mut bytes = Vec::new();
                    for page in pages {
                        let seed = self.dice.roll(5) * self.dice.roll(1 << 40);
                        bytes.extend(content(seed));
                        self.memory.insert((owner, page), seed);
                    }
                    gatherer.pages(owner, start, &bytes).expect("room");
                }
            }
        }
        if self.dice.roll(20) == 0 {
            gatherer.abort();
            // What was found written comes again.
            gatherer.begin(Position::checkpoint(Epoch(self.epoch)), Term(1), true);
            for (&(owner, page), &seed) in &self.memory {
                gatherer.pages(owner, page * PAGE_BYTES, &content(seed)).expect("room");
            }
            gatherer.state(&self.state(&fresh, true).to_bytes());
        } else {
            gatherer.state(&self.state(&fresh, full).to_bytes());
        }
        assert!(gatherer.end().expect("ends"), "only whole pages are cut off");
    }
}

fn memory_of(loaded: &Loaded) -> BTreeMap<(PageOwner, u64), Vec<u8>> {
    let mut found = BTreeMap::new();
    for block in loaded.read(&loaded.all()).expect("reads") {
        let first = block.span.start / PAGE_BYTES;
        for page in 0..block.span.pages {
            let bytes = match &block.content {
                BlockContent::Bytes(bytes) => {
                    let from = (page * PAGE_BYTES) as usize;
                    bytes[from..from + PAGE_BYTES as usize].to_vec()
                }
                BlockContent::Zero => vec![0; PAGE_BYTES as usize],
                BlockContent::Absent => panic!("it is among all"),
            };
            let before = found.insert((block.span.owner, first + page), bytes);
            assert_eq!(before, None, "each page comes once");
        }
    }
    found
}

fn assert_is(loaded: &Loaded, memory: &Memory, what: &str) {
    let found = memory_of(loaded);
    let keys: Vec<_> = found.keys().collect();
    assert_eq!(keys, memory.keys().collect::<Vec<_>>(), "{what}");
    for (place, seed) in memory {
        assert!(found[place] == content(*seed), "{what}: {place:?}");
    }
}

struct Place {
    _directory: tempfile::TempDir,
    path: PathBuf,
    key: Option<Key>,
}

impl Place {
    fn new(key: Option<Key>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        Self { path: directory.path().join("store"), _directory: directory, key }
    }

    fn store(&self) -> Store {
        Store::open(&Address::Directory(self.path.clone()), self.key.clone()).expect("opens")
    }

    fn writer(&self, lineage: &str, term: u64) -> Result<Writer, StoreError> {
        Writer::claim(self.store(), GUEST, (lineage, term), "here", Box::new(|_| Ok(())))
    }

    fn newest(&self) -> (Catalogue, Option<Loaded>) {
        let store = self.store();
        let catalogue = store.catalogue(GUEST).expect("lists");
        let newest = catalogue.newest(None);
        let load = |name| store.look_up(GUEST, &catalogue, name)?.load_ahead(Loaded::all);
        let loaded = newest.map(|name| load(name).expect("loads"));
        (catalogue, loaded)
    }

    fn objects(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut folders = vec![self.path.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() { folders.push(path) } else { found.push(path) }
            }
        }
        found.sort();
        found
    }
}

fn gatherer() -> Gatherer {
    Gatherer::new(&std::env::temp_dir()).expect("a gatherer")
}

fn about() -> About {
    About { settings: vec![("guest".into(), GUEST.into())], ..About::default() }
}

#[test]
fn each_checkpoint_comes_back_as_it_was() {
    let mut folds = 0;
    for seed in 0..12 {
        let place = Place::new((seed % 3 == 0).then(|| Key::of(&[7; 32])));
        let (mut guest, mut gatherer) = (Guest::new(seed), gatherer());
        let mut writer = place.writer("a", 1).expect("claims");
        let mut kept: BTreeMap<u64, Memory> = BTreeMap::new();
        for step in 0..30 {
            for _ in 0..1 + guest.dice.roll(3) {
                guest.run(&mut gatherer, step == 0 || step == 17);
            }
            let batch = gatherer.take().expect("files").expect("something");
            writer.store_batch(&batch, about()).expect("stores");
            kept.insert(guest.epoch, guest.memory.clone());
            let catalogue = place.store().catalogue(GUEST).expect("lists");
            if let Some(folded) = writer.fold(&catalogue).expect("folds") {
                assert_eq!(folded.name.base, Base::Whole);
                folds += 1;
            }
        }
        let store = place.store();
        let catalogue = store.catalogue(GUEST).expect("lists");
        for (epoch, memory) in &kept {
            let name = catalogue.at_epoch(*epoch).expect("it is there");
            let loaded = store.load(GUEST, &catalogue, name).expect("loads");
            assert_is(&loaded, memory, &format!("seed {seed}, epoch {epoch}"));
            assert!(loaded.verify().expect("is whole") > 0);
            assert_eq!(loaded.checkpoint().expect("reads").position.epoch.0, *epoch);
        }
    }
    assert!(folds > 5, "some chains are long");
}

/// Else a full one would be wanted at the end of each, however often that has just failed.
#[test]
fn what_begins_on_nothing_is_dropped_and_asks_for_nothing() {
    let (mut guest, mut fresh) = (Guest::new(3), gatherer());
    guest.epoch = 7;
    let increment = |gatherer: &mut Gatherer| {
        gatherer.begin(Position::checkpoint(Epoch(7)), Term(1), false);
        gatherer.pages(SPACE, 0, &content(9)).expect("room");
        gatherer.state(&guest.state(&[], false).to_bytes());
        assert!(gatherer.end().expect("ends"), "a full one is not asked for again");
        assert!(!gatherer.is_ready() && gatherer.waiting_bytes() == 0);
        assert!(gatherer.take().expect("files").is_none());
    };
    increment(&mut fresh);
    let directory = tempfile::tempdir().expect("a directory");
    for is_gone in [false, true] {
        let mut used = Gatherer::new(directory.path()).expect("a gatherer");
        let mut other = Guest::new(4);
        (0..3).for_each(|step| other.run(&mut used, step == 0));
        assert!(used.is_ready());
        if is_gone {
            std::fs::remove_dir(directory.path()).expect("removes");
        }
        used.forget();
        if !is_gone {
            increment(&mut used);
            continue;
        }
        used.begin(Position::checkpoint(Epoch(4)), Term(1), false);
        used.state(&other.state(&[], false).to_bytes());
        assert!(used.end().expect("ends") && !used.is_ready(), "it stands on what was forgotten");
        assert!(used.take().expect("files").is_none());
    }
}

#[test]
fn file_changes_of_a_chain_come_one_after_another() {
    use std::io::Read;
    let place = Place::new(None);
    let (mut guest, mut gatherer) = (Guest::new(5), gatherer());
    let mut writer = place.writer("a", 1).expect("claims");
    let mut expected = Vec::new();
    let mark = [0u8, 2, 0, 0, 0, 0, 0, 0];
    for epoch in 1..=6u8 {
        let piece = vec![epoch; 300_000 * usize::from(epoch)];
        gatherer.begin(Position::checkpoint(Epoch(epoch.into())), Term(1), epoch == 1);
        gatherer.changes(&piece, epoch == 1).expect("room");
        guest.epoch = epoch.into();
        gatherer.state(&guest.state(&[], epoch == 1).to_bytes());
        assert!(gatherer.end().expect("ends"));
        expected.extend(piece);
        expected.extend(mark);
        if epoch % 2 == 0 {
            let batch = gatherer.take().expect("files").expect("something");
            writer.store_batch(&batch, about()).expect("stores");
        }
    }
    let (_, loaded) = place.newest();
    let loaded = loaded.expect("one");
    assert_eq!(loaded.changes_bytes(), expected.len() as u64);
    let mut read = Vec::new();
    loaded.changes().read_to_end(&mut read).expect("reads");
    assert!(read == expected);
}

/// A copy of a store that gives some answers, and then none.
struct Dies {
    copy: hotspare_store::Bucket,
    left: std::sync::atomic::AtomicU64,
}

impl PackSource for Dies {
    fn parts(&self, wanted: &[(String, Vec<Range<u64>>)]) -> Result<Vec<Parts>, StoreError> {
        let less = |left: u64| left.checked_sub(1);
        let (set, get) =
            (std::sync::atomic::Ordering::Relaxed, std::sync::atomic::Ordering::Relaxed);
        match self.left.fetch_update(set, get, less) {
            Ok(_) => self.copy.parts(wanted),
            Err(_) => Err(StoreError::Unreachable("it has died".into())),
        }
    }

    fn place(&self) -> String {
        "a copy that dies".into()
    }
}

#[test]
fn pages_come_from_whoever_has_them_until_nobody_has() {
    let (place, copied) = (Place::new(None), Place::new(None));
    let (mut guest, mut gatherer) = (Guest::new(6), gatherer());
    let memory = Arc::new(PackMemory::new(1 << 30));
    let store = place.store().with_memory(memory.clone());
    let at_point = Box::new(|_| Ok(()));
    let mut writer = Writer::claim(store, GUEST, ("a", 1), "here", at_point).expect("claims");
    for step in 0..4 {
        guest.run(&mut gatherer, step == 0);
        let batch = gatherer.take().expect("files").expect("something");
        writer.store_batch(&batch, about()).expect("stores");
    }
    for path in place.objects() {
        let to = copied.path.join(path.strip_prefix(&place.path).expect("below it"));
        std::fs::create_dir_all(to.parent().expect("a folder")).expect("makes");
        let bytes = std::fs::read(&path).expect("reads");
        let name = path.strip_prefix(&place.path).expect("below it").to_string_lossy();
        if name.contains("/packs/") {
            let kept = memory.part(&name, 0..bytes.len() as u64);
            assert!(kept.as_ref() == Some(&bytes), "{name} is in memory");
        }
        std::fs::write(to, bytes).expect("writes");
    }
    let dies = |left| {
        let address = Address::Directory(copied.path.clone());
        let copy = hotspare_store::Bucket::open(&address).expect("opens");
        Box::new(Dies { copy, left: std::sync::atomic::AtomicU64::new(left) })
    };
    let read = |store: Store| -> Result<Loaded, StoreError> {
        let catalogue = store.catalogue(GUEST)?;
        let name = catalogue.newest(None).expect("one");
        let loaded = store.load(GUEST, &catalogue, name)?;
        for span in loaded.all() {
            loaded.read_spans(&[span])?;
        }
        Ok(loaded)
    };
    for left in [0, 1, 2, 5, 1000] {
        let loaded = read(place.store().with_nearby(vec![dies(left)])).expect("reads");
        assert_is(&loaded, &guest.memory, "from both");
    }
    let packs = place.objects().into_iter().filter(|path| path.to_string_lossy().contains("packs"));
    packs.for_each(|pack| std::fs::remove_file(pack).expect("deletes"));
    let loaded = read(place.store().with_nearby(vec![dies(1000)])).expect("reads");
    assert_is(&loaded, &guest.memory, "from the copy alone");
    let error = read(place.store().with_nearby(vec![dies(3)])).map(|_| ());
    assert!(matches!(error, Err(StoreError::Missing(_))), "{error:?}");
}

#[test]
fn what_is_cheap_comes_in_few_bytes_and_nothing_is_lost() {
    let place = Place::new(None);
    let (mut guest, mut gatherer) = (Guest::new(5), gatherer());
    let mut writer = place.writer("a", 1).expect("claims");
    for step in 0..4 {
        guest.run(&mut gatherer, step == 0);
        let batch = gatherer.take().expect("files").expect("something");
        writer.store_batch(&batch, about()).expect("stores");
    }
    let (_, loaded) = place.newest();
    let loaded = loaded.expect("one");
    let pages = |spans: &[Span]| -> BTreeSet<(PageOwner, u64)> {
        let each = |span: &Span| {
            let (owner, start) = (span.owner, span.start);
            (0..span.pages).map(move |n| (owner, start + n * PAGE_BYTES))
        };
        spans.iter().flat_map(each).collect()
    };
    let all = loaded.all();
    for room in [0, 10_000, 100_000, u64::MAX] {
        let (cheap, others) = loaded.cheapest(&all, room);
        let (cheap, others) = (pages(&cheap), pages(&others));
        assert!(cheap.is_disjoint(&others), "{room}");
        assert_eq!(cheap.union(&others).count(), pages(&all).len(), "{room}");
        assert!(room < u64::MAX || others.is_empty());
    }
    let dear = loaded.cheapest(&all, 0).1;
    let one = dear.iter().find(|span| span.pages > 8).map(|span| Span { pages: 1, ..*span });
    let one = one.expect("a long one");
    assert!(loaded.dense(&[one]).is_empty(), "a page alone waits for its turn");
}

/// `HOTSPARE_DAMAGES` says how many, with a key and without one.
#[test]
fn a_bit_that_has_changed_and_an_object_that_is_cut_are_found() {
    let rounds = std::env::var("HOTSPARE_DAMAGES").map_or(Ok(1500), |text| text.parse::<u64>());
    let rounds = rounds.expect("a number");
    for key in [None, Some(Key::of(&[3; 32]))] {
        let place = Place::new(key);
        let (mut guest, mut gatherer) = (Guest::new(99), gatherer());
        let mut writer = place.writer("a", 1).expect("claims");
        for step in 0..6 {
            guest.run(&mut gatherer, step == 0);
            let batch = gatherer.take().expect("files").expect("something");
            writer.store_batch(&batch, about()).expect("stores");
        }
        let relevant = |path: &&PathBuf| !path.to_string_lossy().contains("reigns");
        let objects: Vec<PathBuf> = place.objects().iter().filter(relevant).cloned().collect();
        let mut dice = Dice(1);
        for round in 0..rounds {
            let path = &objects[dice.roll(objects.len() as u64) as usize];
            let whole = std::fs::read(path).expect("reads");
            let mut hurt = whole.clone();
            let at = dice.roll(hurt.len() as u64) as usize;
            match dice.roll(3) {
                0 => hurt.truncate(at),
                _ => hurt[at] ^= 1 << dice.roll(8),
            }
            std::fs::write(path, &hurt).expect("writes");
            let store = place.store();
            let catalogue = store.catalogue(GUEST).expect("lists");
            let name = catalogue.newest(None).expect("one");
            let checked = store.load(GUEST, &catalogue, name).and_then(|loaded| loaded.verify());
            let error = checked.expect_err("it is found");
            let named = path.file_name().expect("a name").to_string_lossy().into_owned();
            assert!(error.to_string().contains(&named), "round {round}: {error} of {named}");
            // What a restore does not need may be hurt; what it is given is right.
            if let Ok(known) = store.look_up(GUEST, &catalogue, name)
                && let Ok(loaded) = known.load_ahead(Loaded::all)
                && loaded.read(&loaded.all()).is_ok()
            {
                assert_is(&loaded, &guest.memory, "hurt elsewhere");
            }
            std::fs::write(path, &whole).expect("writes");
        }
        let (_, loaded) = place.newest();
        assert_is(&loaded.expect("one"), &guest.memory, "mended");
    }
}

/// Ends the writer at the `left`th point of this kind.
fn dies_at(point: Point, left: u64) -> (hotspare_store::AtPoint, Arc<Mutex<u64>>) {
    let left = Arc::new(Mutex::new(left));
    let counted = left.clone();
    let hook = move |at: Point| {
        let mut left = counted.lock().expect("nobody panicked");
        if at == point {
            *left = left.saturating_sub(1);
            if *left == 0 {
                return Err(StoreError::Killed(at.name()));
            }
        }
        Ok(())
    };
    (Box::new(hook), left)
}

#[test]
fn whenever_a_writer_dies_the_newest_whole_checkpoint_is_as_it_was() {
    for point in Point::ALL {
        for nth in 1..4 {
            let place = Place::new(None);
            let (mut guest, mut gatherer) = (Guest::new(nth * 31), gatherer());
            let (hook, left) = dies_at(point, nth);
            let claimed = Writer::claim(place.store(), GUEST, ("a", 1), "here", hook);
            let mut kept: BTreeMap<u64, Memory> = BTreeMap::new();
            let keep = Keep { younger: Duration::ZERO, last: 2 };
            let mut run = |writer: Result<Writer, StoreError>| -> Result<(), StoreError> {
                let mut writer = writer?;
                for step in 0..60 {
                    guest.run(&mut gatherer, step == 0);
                    let batch = gatherer.take()?.expect("something");
                    kept.insert(guest.epoch, guest.memory.clone());
                    writer.store_batch(&batch, about())?;
                    let mut catalogue = writer.store().catalogue(GUEST)?;
                    if let Some(folded) = writer.fold(&catalogue)? {
                        catalogue.add(folded.name);
                    }
                    writer.forget(&mut catalogue, &keep, u64::MAX)?;
                }
                Ok(())
            };
            let died = run(claimed);
            if point == Point::Claimed && nth > 1 {
                // There is one claim.
                assert_eq!(died, Ok(()));
                continue;
            }
            assert_eq!(died, Err(StoreError::Killed(point.name())), "{point:?} is reached");
            assert_eq!(*left.lock().expect("nobody panicked"), 0);
            let last = kept.keys().next_back().copied().unwrap_or(0);
            let (catalogue, loaded) = place.newest();
            match loaded {
                None => assert!(last <= 1, "{point:?} {nth}: something was stored"),
                Some(loaded) => {
                    let epoch = loaded.about().position.epoch.0;
                    let unnamed = matches!(point, Point::Pack | Point::Packs);
                    assert!(epoch == last || unnamed && epoch + 1 == last, "{point:?} {nth}");
                    assert_is(&loaded, &kept[&epoch], &format!("{point:?} {nth}"));
                }
            }
            for name in catalogue.names() {
                let store = place.store();
                let loaded = store.load(GUEST, &catalogue, name);
                assert_is(&loaded.expect("loads"), &kept[&name.epoch], "an older one");
            }
            goes_on_after_a_death(&place, &mut guest);
        }
    }
}

/// The next writer starts from whatever is there, and clears it away.
fn goes_on_after_a_death(place: &Place, guest: &mut Guest) {
    let mut gatherer = gatherer();
    let mut writer = place.writer("b", 1).expect("claims");
    guest.run(&mut gatherer, true);
    let batch = gatherer.take().expect("files").expect("something");
    writer.store_batch(&batch, about()).expect("stores");
    let mut catalogue = place.store().catalogue(GUEST).expect("lists");
    let keep = Keep { younger: Duration::ZERO, last: 1 };
    writer.forget(&mut catalogue, &keep, u64::MAX).expect("forgets");
    writer.sweep_older(Duration::ZERO).expect("sweeps");
    let (catalogue, loaded) = place.newest();
    assert_eq!(catalogue.names().len(), 1);
    assert_is(&loaded.expect("one"), &guest.memory, "the next writer's");
    let packs =
        place.objects().iter().filter(|path| path.to_string_lossy().contains("packs")).count();
    assert_eq!(packs, 1, "nothing is left of the dead one");
}

#[test]
fn a_writer_that_was_replaced_writes_and_deletes_nothing() {
    let place = Place::new(None);
    let mut old = place.writer("a", 1).expect("claims");
    let (mut guest, mut gathered) = (Guest::new(1), gatherer());
    guest.run(&mut gathered, true);
    let batch = gathered.take().expect("files").expect("something");
    old.store_batch(&batch, about()).expect("stores");
    let mut new = place.writer("a", 2).expect("claims");
    assert_eq!(place.writer("a", 1).map(|_| ()), Err(StoreError::Fenced(2)), "it was replaced");
    assert_eq!(place.writer("a", 2).map(|_| ()), Err(StoreError::Fenced(2)), "there is one");
    let mut theirs = gatherer();
    let mut other = Guest::new(2);
    other.run(&mut theirs, true);
    new.store_batch(&theirs.take().expect("files").expect("something"), about()).expect("stores");
    guest.run(&mut gathered, false);
    let late = gathered.take().expect("files").expect("something");
    assert_eq!(old.store_batch(&late, about()), Err(StoreError::Fenced(2)));
    let mut catalogue = place.store().catalogue(GUEST).expect("lists");
    let keep = Keep { younger: Duration::ZERO, last: 1 };
    assert_eq!(old.forget(&mut catalogue, &keep, u64::MAX), Err(StoreError::Fenced(2)));
    assert_eq!(old.sweep(), Err(StoreError::Fenced(2)));
    let (catalogue, loaded) = place.newest();
    assert_eq!(catalogue.names().len(), 2);
    assert_is(&loaded.expect("one"), &other.memory, "the new one's");
    // Another run of the guest is another matter.
    assert!(place.writer("b", 1).is_ok());
}

#[test]
fn two_that_claim_at_once_have_different_reigns() {
    let place = Place::new(None);
    let claims: Vec<u64> = std::thread::scope(|scope| {
        let claim = |n: usize| {
            let place = &place;
            move || place.writer(&format!("run {n}"), 1).expect("claims").reign()
        };
        let threads: Vec<_> = (0..8).map(|n| scope.spawn(claim(n))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let mut sorted = claims.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (1..=8).collect::<Vec<_>>());
}

#[test]
fn a_day_of_checkpoints_stays_bounded() {
    let place = Place::new(None);
    let (mut guest, mut gatherer) = (Guest::new(4), gatherer());
    let mut writer = place.writer("a", 1).expect("claims");
    let keep = Keep { younger: Duration::ZERO, last: 20 };
    let mut most = 0;
    let mut catalogue = Catalogue::default();
    for step in 0..400 {
        guest.run(&mut gatherer, step == 0);
        let batch = gatherer.take().expect("files").expect("something");
        catalogue.add(writer.store_batch(&batch, about()).expect("stores").name);
        if let Some(folded) = writer.fold(&catalogue).expect("folds") {
            catalogue.add(folded.name);
        }
        writer.forget(&mut catalogue, &keep, u64::MAX).expect("forgets");
        assert_eq!(catalogue, place.store().catalogue(GUEST).expect("lists"));
        most = most.max(catalogue.names().len());
    }
    assert!(most < 20 + 2 * 121, "{most}");
    let (_, loaded) = place.newest();
    assert_is(&loaded.expect("one"), &guest.memory, "the last");
}

#[test]
fn the_wrong_key_and_no_key_are_said() {
    let place = Place::new(Some(Key::of(&[1; 32])));
    let (mut guest, mut gatherer) = (Guest::new(1), gatherer());
    let mut writer = place.writer("a", 1).expect("claims");
    guest.run(&mut gatherer, true);
    let batch = gatherer.take().expect("files").expect("something");
    writer.store_batch(&batch, about()).expect("stores");
    for key in [None, Some(Key::of(&[2; 32]))] {
        let address = Address::Directory(place.path.clone());
        let store = Store::open(&address, key).expect("opens");
        let catalogue = store.catalogue(GUEST).expect("lists");
        let name = catalogue.newest(None).expect("one");
        let error = store.load(GUEST, &catalogue, name).expect_err("does not open");
        assert!(error.to_string().contains("--store-key"), "{error}");
    }
    let bytes = content(123);
    let leaks = |path: &Path| {
        let object = std::fs::read(path).expect("reads");
        object.windows(16).any(|window| window == &bytes[..16])
    };
    assert!(!place.objects().iter().any(|path| leaks(path)));
}
