//! The changes of one epoch, on their way from the cut to the spare.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use hotspare_image::files::{FileChange, InodeNumber, decode_changes, encode_changes};

use crate::error::FilesError;
use crate::log::{Cut, Recorded};

/// Longest piece in which a write is handed on, bytes.
const PIECE_BYTES_MAX: u64 = 1 << 20;

/// Content a staged set keeps in memory, bytes; beyond it content goes to a temporary file.
const STAGED_MEMORY_BYTES_MAX: u64 = 16 << 20;

/// All changes of a replicated directory between two cuts.
///
/// On the primary [`crate::ReplicatedDir::cut`] makes it and [`ChangeSet::chunks`] encodes it for
/// the stream. On the spare [`ChangeSet::push_chunk`] collects the chunks, and once the checkpoint
/// is complete [`crate::ReplicatedDir::apply`] applies the set.
#[derive(Debug, Default)]
pub struct ChangeSet {
    recorded: Vec<Recorded>,
    spill: Option<Arc<File>>,
    /// Where a staged set puts what does not fit in memory.
    staging: Option<PathBuf>,
    memory_bytes: u64,
    spilled_bytes: u64,
}

impl ChangeSet {
    pub(crate) fn from_cut(cut: Cut) -> ChangeSet {
        let mut set = ChangeSet { spill: cut.spill, ..ChangeSet::default() };
        for entry in &cut.recorded {
            match entry {
                Recorded::Change(change) => set.memory_bytes += change.content_bytes() as u64,
                Recorded::Spilled { length, .. } => set.spilled_bytes += length,
            }
        }
        set.recorded = cut.recorded;
        set
    }

    /// An empty set to collect received chunks in. What exceeds 16 MiB of content is kept in an
    /// unnamed file in `directory`.
    pub fn staging(directory: impl Into<PathBuf>) -> ChangeSet {
        ChangeSet { staging: Some(directory.into()), ..ChangeSet::default() }
    }

    pub(crate) fn push(&mut self, change: FileChange) {
        self.memory_bytes += change.content_bytes() as u64;
        self.recorded.push(Recorded::Change(change));
    }

    /// Appends the changes of one chunk.
    pub fn push_chunk(&mut self, chunk: &[u8]) -> Result<(), FilesError> {
        let changes =
            decode_changes(chunk).map_err(|error| FilesError::Malformed(error.to_string()))?;
        for change in changes {
            match change {
                FileChange::Write { inode, offset, bytes }
                    if self.memory_bytes + bytes.len() as u64 > STAGED_MEMORY_BYTES_MAX =>
                {
                    self.stage_on_disk(inode, offset, &bytes)?;
                }
                change => self.push(change),
            }
        }
        Ok(())
    }

    /// Appends the changes of `later`.
    pub fn append(&mut self, later: &ChangeSet) -> Result<(), FilesError> {
        for chunk in later.chunks(PIECE_BYTES_MAX as usize) {
            self.push_chunk(&chunk?)?;
        }
        Ok(())
    }

    fn stage_on_disk(
        &mut self,
        inode: InodeNumber,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), FilesError> {
        let Some(directory) = self.staging.clone() else {
            self.push(FileChange::Write { inode, offset, bytes: bytes.to_vec() });
            return Ok(());
        };
        let failed =
            |error: io::Error| FilesError::backing("stage a checkpoint in", &directory, error);
        let file = match &self.spill {
            Some(file) => file,
            None => self.spill.insert(Arc::new(tempfile::tempfile_in(&directory).map_err(failed)?)),
        };
        let at = self.spilled_bytes;
        let length = bytes.len() as u64;
        file.write_all_at(bytes, at).map_err(failed)?;
        self.spilled_bytes += length;
        self.recorded.push(Recorded::Spilled { inode, offset, at, length });
        Ok(())
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.recorded.is_empty()
    }

    /// Number of changes.
    pub fn len(&self) -> usize {
        self.recorded.len()
    }

    /// Bytes of file content.
    pub fn content_bytes(&self) -> u64 {
        self.memory_bytes + self.spilled_bytes
    }

    /// The changes in order, content in pieces of at most 1 MiB.
    pub fn changes(&self) -> impl Iterator<Item = Result<FileChange, FilesError>> + '_ {
        self.recorded.iter().flat_map(|entry| Pieces { set: self, entry, done: 0 })
    }

    /// The changes encoded, in order, in chunks of about `chunk_bytes` of content (at most that
    /// plus 1 MiB), each of which [`ChangeSet::push_chunk`] takes.
    pub fn chunks(
        &self,
        chunk_bytes: usize,
    ) -> impl Iterator<Item = Result<Vec<u8>, FilesError>> + '_ {
        encode_in_chunks(self.changes(), chunk_bytes)
    }

    /// The same for whoever hands them out later.
    pub fn into_chunks(
        self,
        chunk_bytes: usize,
    ) -> impl Iterator<Item = Result<Vec<u8>, FilesError>> + 'static {
        let (mut index, mut done) = (0, 0);
        let changes = std::iter::from_fn(move || {
            while let Some(entry) = self.recorded.get(index) {
                let mut pieces = Pieces { set: &self, entry, done };
                let change = pieces.next();
                done = pieces.done;
                if change.is_some() {
                    return change;
                }
                (index, done) = (index + 1, 0);
            }
            None
        });
        encode_in_chunks(changes, chunk_bytes)
    }

    fn read_spilled(&self, at: u64, length: u64) -> Result<Vec<u8>, FilesError> {
        let mut bytes = vec![0; length as usize];
        let read = match &self.spill {
            Some(file) => file.read_exact_at(&mut bytes, at),
            None => Err(io::Error::other("the set has no temporary file")),
        };
        match read {
            Ok(()) => Ok(bytes),
            Err(error) => Err(FilesError::ChangesLost {
                path: self.staging.clone().unwrap_or_default(),
                reason: format!("cannot read them back from a temporary file: {error}"),
            }),
        }
    }
}

/// Encodes changes in chunks of about `chunk_bytes` of content.
pub(crate) fn encode_in_chunks(
    mut changes: impl Iterator<Item = Result<FileChange, FilesError>>,
    chunk_bytes: usize,
) -> impl Iterator<Item = Result<Vec<u8>, FilesError>> {
    /// What a change counts besides its content.
    const CHANGE_BYTES: usize = 64;
    std::iter::from_fn(move || {
        let (mut chunk, mut bytes) = (Vec::new(), 0);
        while bytes < chunk_bytes {
            match changes.next() {
                Some(Ok(change)) => {
                    bytes += change.content_bytes() + CHANGE_BYTES;
                    chunk.push(change);
                }
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            }
        }
        (!chunk.is_empty()).then(|| Ok(encode_changes(&chunk)))
    })
}

/// An entry as changes with at most 1 MiB of content each.
struct Pieces<'a> {
    set: &'a ChangeSet,
    entry: &'a Recorded,
    /// Bytes of content handed out; `u64::MAX` when the entry is done.
    done: u64,
}

impl Pieces<'_> {
    fn piece(
        &mut self,
        inode: InodeNumber,
        start: u64,
        length: u64,
        read: impl FnOnce(u64, u64) -> Result<Vec<u8>, FilesError>,
    ) -> Result<FileChange, FilesError> {
        let (from, count) = (self.done, (length - self.done).min(PIECE_BYTES_MAX));
        self.done = if from + count < length { from + count } else { u64::MAX };
        let bytes = read(from, count).inspect_err(|_| self.done = u64::MAX)?;
        Ok(FileChange::Write { inode, offset: start + from, bytes })
    }
}

impl Iterator for Pieces<'_> {
    type Item = Result<FileChange, FilesError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done == u64::MAX {
            return None;
        }
        let set = self.set;
        Some(match self.entry {
            Recorded::Change(FileChange::Write { inode, offset, bytes }) => {
                self.piece(*inode, *offset, bytes.len() as u64, |from, count| {
                    Ok(bytes[from as usize..(from + count) as usize].to_vec())
                })
            }
            Recorded::Spilled { inode, offset, at, length } => {
                self.piece(*inode, *offset, *length, |from, count| {
                    set.read_spilled(at + from, count)
                })
            }
            Recorded::Change(change) => {
                self.done = u64::MAX;
                Ok(change.clone())
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::{ChangeLog, LogLimits};
    use hotspare_image::files::CopyMark;

    #[test]
    fn what_exceeds_memory_comes_back_from_disk_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let limits = LogLimits { soft_bytes: u64::MAX, hard_bytes: 3 << 20 };
        let log = ChangeLog::new(limits, directory.path().to_owned());
        log.mark(CopyMark(1));
        let mut expected = vec![0u8; 5 << 20];
        for (index, piece) in expected.chunks_mut(1 << 18).enumerate() {
            piece.fill(index as u8 + 1);
            log.write(InodeNumber(2), index as u64 * (1 << 18), piece);
        }
        let set = ChangeSet::from_cut(log.cut().unwrap());
        assert!(set.spilled_bytes > 0 && set.memory_bytes > 0);
        let mut staged = ChangeSet::staging(directory.path());
        for chunk in set.chunks(256 << 10) {
            let chunk = chunk.unwrap();
            assert!(chunk.len() < (256 << 10) + (1 << 20) + 4096);
            staged.push_chunk(&chunk).unwrap();
        }
        let later: Vec<_> = set.chunks(256 << 10).map(Result::unwrap).collect();
        assert!(set.into_chunks(256 << 10).map(Result::unwrap).eq(later));
        let mut rebuilt = vec![0u8; 5 << 20];
        for change in staged.changes() {
            if let FileChange::Write { offset, bytes, .. } = change.unwrap() {
                rebuilt[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
            }
        }
        assert!(rebuilt == expected);
    }

    #[test]
    fn a_truncation_stays_between_the_writes_around_it() {
        let log = ChangeLog::new(LogLimits::default(), std::env::temp_dir());
        log.mark(CopyMark(1));
        let file = InodeNumber(2);
        log.write(file, 0, b"first");
        log.record_content(file, FileChange::Truncate { inode: file, size_bytes: 0 });
        log.write(file, 2, b"second");
        let set = ChangeSet::from_cut(log.cut().unwrap());
        let changes: Vec<FileChange> = set.changes().map(Result::unwrap).collect();
        assert_eq!(
            changes[1..],
            [
                FileChange::Write { inode: file, offset: 0, bytes: b"first".to_vec() },
                FileChange::Truncate { inode: file, size_bytes: 0 },
                FileChange::Write { inode: file, offset: 2, bytes: b"second".to_vec() },
            ]
        );
    }

    #[test]
    fn a_log_that_cannot_be_kept_says_so() {
        let limits = LogLimits { soft_bytes: u64::MAX, hard_bytes: 10 };
        let log = ChangeLog::new(limits, "/nonexistent".into());
        log.mark(CopyMark(1));
        log.write(InodeNumber(2), 0, b"more than ten bytes");
        assert!(log.cut().unwrap_err().contains("temporary file"));
    }
}
