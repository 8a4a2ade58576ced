//! Files that are neither shared nor replicated must be alike on both hosts: the program, its
//! libraries, whatever it reads. The primary says which they are, the spare compares.
//!
//! Two looks on the primary. Before a full checkpoint is copied, a look at the running guest: so
//! that a file which differs is found at once, and not after gigabytes. Then, before the end of
//! each checkpoint, exactly the files in it: a library that was loaded meanwhile is among them.
//! Files are read by a thread of their own, never while the guest stands still.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hotspare_files::{FilesError, Identities};
use hotspare_image::Checkpoint;
use hotspare_image::files::FileIdentity;
use hotspare_image::memory::{Backing, MappedFile};
use hotspare_image::objects::Object;
use hotspare_kernel::HostPid;
use hotspare_process::objects::error::{ObjectError, ObjectResult};
use hotspare_process::objects::rules::{FileRules, Standing};

/// How often files that were compared are looked at again.
const AGAIN: Duration = Duration::from_secs(2);
/// First and longest wait before files that differ are compared once more.
const RETRY_FILES: Duration = Duration::from_secs(2);
const RETRY_FILES_MAX: Duration = Duration::from_secs(30);
/// What is known already is answered within this time.
const PROMPT: Duration = Duration::from_millis(1);

/// What this program has read of files, for all connections.
static KNOWN: LazyLock<Mutex<Identities>> = LazyLock::new(Mutex::default);

fn identify(path: &Path) -> Result<FileIdentity, FilesError> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).identify(path)
}

enum Ask {
    /// What these processes use now.
    Processes(Vec<HostPid>),
    Paths(Vec<String>),
}

type Answer = ObjectResult<Vec<FileIdentity>>;

/// Whether the files of a checkpoint have been named to the spares.
pub enum Told {
    /// All of them; these are new or have changed.
    All(Vec<FileIdentity>),
    /// They are being read.
    Reading,
}

/// The primary's side.
pub struct Alike {
    rules: FileRules,
    reader: Option<(Sender<Ask>, Receiver<Answer>)>,
    is_asked: bool,
    /// Since the last full checkpoint began: what the spares have been told.
    told: BTreeMap<String, FileIdentity>,
    /// Of that, what they have not been sent.
    unsent: Vec<FileIdentity>,
    /// The running guest was looked at for this full checkpoint.
    looked: bool,
    checked: Instant,
}

impl Alike {
    /// For a guest with these rules.
    pub fn new(rules: FileRules) -> Self {
        let (reader, told, unsent) = Default::default();
        let checked = Instant::now();
        Self { rules, reader, is_asked: false, told, unsent, looked: false, checked }
    }

    /// A full checkpoint begins: the spares are to be told everything again.
    pub fn forget(&mut self) {
        self.told.clear();
        self.unsent.clear();
        self.looked = false;
    }

    /// Before a full checkpoint is copied: what the guest uses now.
    pub fn before_copy(&mut self, processes: impl Iterator<Item = HostPid>) -> ObjectResult<Told> {
        if !self.looked {
            if !self.hear(|| Ask::Processes(processes.collect()))? {
                return Ok(Told::Reading);
            }
            self.looked = true;
        }
        Ok(Told::All(std::mem::take(&mut self.unsent)))
    }

    /// Before the end of a checkpoint: what is in it.
    pub fn before_end(&mut self, checkpoint: &Checkpoint) -> ObjectResult<Told> {
        let used = used(checkpoint, &self.rules)?;
        let mut again = self.checked.elapsed() >= AGAIN;
        // Twice, as the first answer may be to an older question.
        for _ in 0..2 {
            let is_known = used.iter().all(|path| self.told.contains_key(*path));
            if is_known && !again && !self.is_asked {
                return Ok(Told::All(std::mem::take(&mut self.unsent)));
            }
            if !self.hear(|| Ask::Paths(used.iter().map(|&path| path.to_owned()).collect()))? {
                break;
            }
            again = false;
            self.checked = Instant::now();
        }
        Ok(Told::Reading)
    }

    /// Asks, unless that is done, and looks for the answer; true if it is there.
    fn hear(&mut self, question: impl FnOnce() -> Ask) -> ObjectResult<bool> {
        let failed = |why: String| ObjectError::refused("the files of the program", why);
        let (ask, answers) = match &self.reader {
            Some(reader) => reader,
            None => {
                let started = start_reader(self.rules.clone());
                let started =
                    started.map_err(|error| failed(format!("start a thread: {error}")))?;
                self.reader.insert(started)
            }
        };
        if !std::mem::replace(&mut self.is_asked, true) {
            // The thread lives as long as we do.
            let _ = ask.send(question());
        }
        let answer = match answers.recv_timeout(PROMPT) {
            Err(RecvTimeoutError::Timeout) => return Ok(false),
            Err(gone @ RecvTimeoutError::Disconnected) => return Err(failed(gone.to_string())),
            Ok(answer) => answer,
        };
        self.is_asked = false;
        for identity in answer? {
            let path = String::from_utf8_lossy(&identity.path).into_owned();
            if self.told.get(&path) != Some(&identity) {
                self.told.insert(path, identity.clone());
                self.unsent.push(identity);
            }
        }
        Ok(true)
    }
}

fn start_reader(rules: FileRules) -> std::io::Result<(Sender<Ask>, Receiver<Answer>)> {
    let (ask, asked) = channel::<Ask>();
    let (answer, answers) = channel();
    let read = move || {
        for question in asked {
            let paths = match question {
                Ask::Processes(processes) => in_use(&processes, &rules),
                Ask::Paths(paths) => Ok(paths),
            };
            let identities = paths.and_then(|paths| paths.iter().map(|p| named(p)).collect());
            if answer.send(identities).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("files".into()).spawn(read)?;
    Ok((ask, answers))
}

fn named(path: &str) -> ObjectResult<FileIdentity> {
    identify(Path::new(path)).map_err(|error| {
        let reason = format!("the program uses it, and it cannot be compared: {error}");
        ObjectError::refused(path, reason)
    })
}

fn replaced(path: &str) -> ObjectError {
    let reason = "the program has it mapped, but it was deleted or replaced since (an upgrade?): \
        restart the program, or name its directory with --files replicate:DIR";
    ObjectError::refused(path, reason)
}

fn passing(path: &str) -> ObjectError {
    let reason = "/dev/shm is the guest's own and is not carried; keep it in a replicated \
        directory, or in a memfd";
    ObjectError::refused(path, reason)
}

fn is_passing(path: &str, rules: &FileRules) -> bool {
    path.starts_with("/dev/shm/") && rules.standing(path) == Standing::Compared
}

fn is_compared(path: &str, rules: &FileRules) -> bool {
    let of_the_kernel =
        ["/proc/", "/sys/", "/dev/", "/memfd:", "/SYSV", "/[", "/anon_hugepage", "/secretmem"];
    path.starts_with('/')
        && !of_the_kernel.iter().any(|start| path.starts_with(start))
        && rules.standing(path) == Standing::Compared
}

/// The files of a checkpoint that must be alike.
fn used<'a>(checkpoint: &'a Checkpoint, rules: &FileRules) -> ObjectResult<BTreeSet<&'a str>> {
    let mut found = BTreeSet::new();
    for space in &checkpoint.spaces {
        found.insert(space.exe.0.as_str());
        for mapping in &space.mappings {
            let (Backing::PrivateFile { file, .. } | Backing::SharedFile { file, .. }) =
                &mapping.backing
            else {
                continue;
            };
            let MappedFile { path, unlinked_inode, .. } = file;
            if unlinked_inode.is_some() && is_compared(&path.0, rules) {
                return Err(replaced(&path.0));
            }
            found.insert(path.0.as_str());
        }
    }
    for file in &checkpoint.files {
        if let Object::Regular(regular) = &file.object
            && file.flags & libc::O_PATH as u32 == 0
        {
            found.insert(regular.path.0.as_str());
        }
    }
    if let Some(path) = found.iter().find(|path| is_passing(path, rules)) {
        return Err(passing(path));
    }
    found.retain(|path| is_compared(path, rules) && !path.ends_with(" (deleted)"));
    Ok(found)
}

/// What the running `processes` use, as far as it can be seen from outside; one that ends
/// meanwhile uses nothing any more.
fn in_use(processes: &[HostPid], rules: &FileRules) -> ObjectResult<Vec<String>> {
    let mut found = BTreeSet::new();
    let (mut buffer, mut lines) = (Vec::new(), Vec::new());
    for &pid in processes {
        if hotspare_kernel::proc_maps::read(pid, &mut buffer, &mut lines).is_err() {
            continue;
        }
        for line in &lines {
            match line.name.strip_suffix(" (deleted)") {
                Some(path) if is_compared(path, rules) => return Err(replaced(path)),
                Some(_) => {}
                None => drop(found.insert(line.name.clone())),
            }
        }
        found.extend(read_only_files(pid));
    }
    if let Some(path) = found.iter().find(|path| is_passing(path, rules)) {
        return Err(passing(path));
    }
    found.retain(|path| is_compared(path, rules));
    Ok(found.into_iter().collect())
}

/// Regular files that a process has open for reading.
fn read_only_files(pid: HostPid) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let open = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.ok()?.path();
        let is_file = std::fs::metadata(&entry).ok()?.is_file();
        let link = std::fs::read_link(&entry).ok()?.into_os_string().into_string().ok()?;
        let number = entry.file_name()?.to_str()?.to_owned();
        let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        let flags = i32::from_str_radix(flags.trim(), 8).ok()?;
        let reads = flags & (libc::O_ACCMODE | libc::O_PATH) == libc::O_RDONLY;
        (is_file && reads && !link.ends_with(" (deleted)")).then_some(link)
    };
    entries.filter_map(open).collect()
}

/// Files differ between the hosts; the text names them and the way out. It is of no use to try
/// again at once.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FilesDiffer(pub String);

/// Waits between attempts to come together with another host, and says what is wrong once.
pub struct Attempts {
    said: String,
    wait: Duration,
}

impl Attempts {
    /// Nothing was tried yet.
    pub fn new() -> Self {
        Self { said: String::new(), wait: RETRY_FILES }
    }

    /// An attempt ended like this: what to say, if it is new, and how long to wait for the next,
    /// which is `usual` except where somebody has to make files equal first.
    pub fn ended(
        &mut self,
        met: anyhow::Result<()>,
        usual: Duration,
    ) -> (Option<String>, Duration) {
        let Err(error) = met else {
            *self = Self::new();
            return (None, usual);
        };
        let text = format!("{error:#}");
        let news = (text != self.said).then(|| text.clone());
        self.said = text;
        if error.downcast_ref::<FilesDiffer>().is_none() {
            self.wait = RETRY_FILES;
            return (news, usual);
        }
        let wait = self.wait;
        self.wait = (wait * 2).min(RETRY_FILES_MAX);
        (news, wait)
    }
}

/// The spare's side of one connection.
#[derive(Default)]
pub struct Comparison {
    theirs: BTreeMap<Vec<u8>, FileIdentity>,
    looked: Option<Instant>,
    told: BTreeSet<PathBuf>,
}

impl Comparison {
    /// Compares what the primary names with what is here; the error says all that differs.
    pub fn compare(&mut self, theirs: Vec<FileIdentity>) -> Result<(), String> {
        let found = KNOWN.lock().unwrap_or_else(PoisonError::into_inner).compare(&theirs);
        self.theirs.extend(theirs.into_iter().map(|one| (one.path.clone(), one)));
        if found.is_empty() {
            return Ok(());
        }
        let some: Vec<String> = found.iter().take(8).map(ToString::to_string).collect();
        let more = match found.len() - some.len() {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        Err(format!("files differ between the hosts: {}{more}", some.join("; ")))
    }

    /// Files that were alike and are not any more, each told once. The ghost has mapped what it
    /// had; what is opened at a takeover is what is there then.
    pub fn look_again(&mut self) -> Vec<PathBuf> {
        if self.looked.is_some_and(|looked| looked.elapsed() < AGAIN) {
            return Vec::new();
        }
        self.looked = Some(Instant::now());
        let theirs: Vec<FileIdentity> = self.theirs.values().cloned().collect();
        let found = KNOWN.lock().unwrap_or_else(PoisonError::into_inner).compare(&theirs);
        let paths = found.into_iter().map(|mismatch| mismatch.path);
        paths.filter(|path| self.told.insert(path.clone())).collect()
    }
}
