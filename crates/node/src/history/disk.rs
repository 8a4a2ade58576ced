//! Histories on disk: appended to, turned over when they grow, read with their torn lines.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::record::Record;

/// A file that has grown to this is put aside; the one put aside before is forgotten.
const FILE_BYTES: u64 = 4 << 20;
/// Longest name of a directory. What a name loses, the record has.
const NAME_BYTES_MAX: usize = 200;
/// How often a file may be put aside by somebody else between opening and locking it.
const RACES_MAX: u32 = 100;

/// The history of a guest below `state`.
pub fn path(state: &Path, guest: &str) -> PathBuf {
    let mut name = String::new();
    for byte in guest.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => name.push(char::from(byte)),
            b'.' if !name.is_empty() => name.push('.'),
            other => name.push_str(&format!("%{other:02X}")),
        }
    }
    let tail = name.len().saturating_sub(NAME_BYTES_MAX);
    let name = if name.is_empty() { "%" } else { &name[tail..] };
    state.join(name).join("history.jsonl")
}

/// Where the older half lies.
fn aside(path: &Path) -> PathBuf {
    path.with_extension("1.jsonl")
}

/// Appends a line; on success it is on disk. On failure the file is as before, or ends with a torn
/// line.
pub fn append(path: &Path, line: &str) -> io::Result<()> {
    let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    for _ in 0..RACES_MAX {
        let made = !path.exists();
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        // Two agents of one guest may be on a host: the one that was fenced, and a new spare.
        file.lock()?;
        if fs::metadata(path).ok().map(|there| there.ino()) != Some(file.metadata()?.ino()) {
            continue;
        }
        let length = file.metadata()?.len();
        if length >= FILE_BYTES {
            fs::rename(path, aside(path))?;
            continue;
        }
        let mut text = String::with_capacity(line.len() + 2);
        if !ends_a_line(&mut file, length)? {
            text.push('\n');
        }
        text.push_str(line);
        text.push('\n');
        if let Err(error) = file.write_all(text.as_bytes()).and_then(|()| file.sync_data()) {
            // A full disk may have taken a part.
            let _ = file.set_len(length);
            return Err(error);
        }
        if made {
            File::open(directory)?.sync_all()?;
        }
        return Ok(());
    }
    Err(io::Error::other("it is put aside again and again"))
}

fn ends_a_line(file: &mut File, length: u64) -> io::Result<bool> {
    if length == 0 {
        return Ok(true);
    }
    let mut last = [0u8];
    file.seek(SeekFrom::Start(length - 1))?;
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

/// The records of a history in the order in which they were written, and how many lines are none.
pub fn read(path: &Path) -> io::Result<(Vec<Record>, usize)> {
    let (mut records, mut torn) = (Vec::new(), 0);
    for path in [&aside(path), path] {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for line in bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match serde_json::from_slice(line) {
                Ok(record) => records.push(record),
                Err(_) => torn += 1,
            }
        }
    }
    Ok((records, torn))
}

/// The histories below `state`, as paths for [`read`].
pub fn all(state: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(state) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path().join("history.jsonl");
        if path.is_file() || aside(&path).is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::What;
    use hotspare_image::NodeId;

    fn line(epoch: u64) -> String {
        Record::now("alpha", NodeId(7), "redis", (1, epoch), What::Protected).to_line()
    }

    fn epochs(path: &Path) -> (Vec<u64>, usize) {
        let (records, torn) = read(path).unwrap();
        (records.iter().map(|record| record.epoch).collect(), torn)
    }

    #[test]
    fn a_torn_line_costs_itself_only() {
        let state = tempfile::tempdir().unwrap();
        let path = path(state.path(), "redis");
        append(&path, &line(1)).unwrap();
        let half = &line(2)[..40];
        OpenOptions::new().append(true).open(&path).unwrap().write_all(half.as_bytes()).unwrap();
        assert_eq!(epochs(&path), (vec![1], 1));
        append(&path, &line(3)).unwrap();
        assert_eq!(epochs(&path), (vec![1, 3], 1));
    }

    #[test]
    fn a_history_does_not_grow_for_ever() {
        let state = tempfile::tempdir().unwrap();
        let path = path(state.path(), "redis");
        append(&path, &line(1)).unwrap();
        for round in 2..5 {
            let filler = "x".repeat(FILE_BYTES as usize) + "\n";
            OpenOptions::new()
                .append(true)
                .open(&path)
                .unwrap()
                .write_all(filler.as_bytes())
                .unwrap();
            append(&path, &line(round)).unwrap();
            assert!(fs::metadata(&path).unwrap().len() < 1000);
        }
        assert_eq!(epochs(&path).0, [3, 4]);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 2);
    }

    #[test]
    fn whatever_a_guest_is_called_it_has_a_directory_of_its_own() {
        let state = Path::new("/state");
        let name = |guest| {
            let path = path(state, guest);
            assert_eq!(path.parent().unwrap().parent().unwrap(), state, "{guest}");
            path.parent().unwrap().file_name().unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(name("redis-1.2"), "redis-1.2");
        assert_eq!(name("/bin/true"), "%2Fbin%2Ftrue");
        assert_eq!(name(".."), "%2E.");
        assert_eq!(name(""), "%");
        assert_eq!(name(&"/long".repeat(1000)).len(), NAME_BYTES_MAX);
    }

    #[test]
    fn two_writers_do_not_tear_each_others_lines() {
        let state = tempfile::tempdir().unwrap();
        let path = path(state.path(), "redis");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..25).for_each(|epoch| append(&path, &line(epoch)).unwrap()));
            }
        });
        let (records, torn) = read(&path).unwrap();
        assert_eq!((records.len(), torn), (100, 0));
    }
}
