"""A saved recommender as an HTTP service, and a page that shows what a query did."""
