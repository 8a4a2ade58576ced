//! A checkpoint's pages kept aside, as a store has them, at the end of a slow line.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hotspare_image::memory::{PAGE_BYTES, PageOwner};
use hotspare_image::source::{Block, BlockContent, PageSource, SourceError, Span};
use hotspare_process::pages::{Content, PageRun};

/// What a page holds.
#[derive(Clone)]
enum Page {
    Bytes(Vec<u8>),
    Zero,
}

/// The pages, and the line they come over.
#[derive(Default)]
pub struct Stored {
    pages: BTreeMap<(PageOwner, u64), Page>,
    /// Round trip.
    pub delay: Duration,
    /// 0 is no limit.
    pub bytes_per_second: u64,
    /// Requests after which the line is dead.
    pub requests_max: Option<u64>,
    requests: AtomicU64,
    free_at: Mutex<Option<Instant>>,
}

impl Stored {
    pub fn take(&mut self, runs: &[PageRun]) {
        for run in runs {
            for page in 0..run.pages() {
                let key = (run.owner, run.start + page * PAGE_BYTES);
                let at = (page * PAGE_BYTES) as usize;
                match &run.content {
                    Content::Bytes(bytes) => {
                        let bytes = bytes[at..at + PAGE_BYTES as usize].to_vec();
                        self.pages.insert(key, Page::Bytes(bytes));
                    }
                    Content::Zero(_) => drop(self.pages.insert(key, Page::Zero)),
                    Content::Discard(_) => drop(self.pages.remove(&key)),
                }
            }
        }
    }

    /// One request after the other has the line.
    fn wait(&self, bytes: u64) {
        let now = Instant::now();
        let mut ready = now;
        if self.bytes_per_second > 0 {
            let mut free_at = self.free_at.lock().expect("locks");
            ready = free_at.unwrap_or(now).max(now)
                + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
            *free_at = Some(ready);
        }
        std::thread::sleep(ready + self.delay - now);
    }
}

impl PageSource for Stored {
    fn read(&self, wanted: &[Span]) -> Result<Vec<Block>, SourceError> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        if self.requests_max.is_some_and(|most| number >= most) {
            return Err(SourceError::Gone("the line is dead".into()));
        }
        let mut blocks: Vec<Block> = Vec::new();
        for span in wanted {
            let owner = span.owner;
            let mut bytes = Vec::new();
            for start in (span.start..span.end()).step_by(PAGE_BYTES as usize) {
                let content = match self.pages.get(&(owner, start)) {
                    Some(Page::Bytes(page)) => {
                        bytes.extend_from_slice(page);
                        continue;
                    }
                    Some(Page::Zero) => BlockContent::Zero,
                    None => BlockContent::Absent,
                };
                end_block(owner, start, &mut bytes, &mut blocks);
                blocks.push(Block { span: Span { owner, start, pages: 1 }, content });
            }
            end_block(owner, span.end(), &mut bytes, &mut blocks);
        }
        self.wait(wanted.iter().map(|span| span.pages * PAGE_BYTES).sum());
        Ok(blocks)
    }

    fn all(&self) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        for &(owner, start) in self.pages.keys() {
            match spans.last_mut() {
                Some(last) if last.owner == owner && last.end() == start => last.pages += 1,
                _ => spans.push(Span { owner, start, pages: 1 }),
            }
        }
        spans
    }
}

fn end_block(owner: PageOwner, end: u64, bytes: &mut Vec<u8>, blocks: &mut Vec<Block>) {
    let length = bytes.len() as u64;
    if length > 0 {
        let span = Span { owner, start: end - length, pages: length / PAGE_BYTES };
        let content = BlockContent::Bytes(std::mem::take(bytes).into());
        blocks.push(Block { span, content });
    }
}
