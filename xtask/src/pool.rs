//! Work that is done side by side.

use std::sync::Mutex;

/// Calls `work` for each item, `jobs` at once, in their order.
pub fn side_by_side<T: Send>(
    jobs: usize,
    items: impl IntoIterator<Item = T, IntoIter: Send>,
    work: impl Fn(T) + Sync,
) {
    let items = Mutex::new(items.into_iter());
    let next = || items.lock().ok()?.next();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while let Some(item) = next() {
                    work(item);
                }
            });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_worked_on_once() {
        let seen = Mutex::new(Vec::new());
        side_by_side(3, 0..100, |item| seen.lock().expect("is sound").push(item));
        let mut seen = seen.into_inner().expect("is sound");
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..100));
    }
}
